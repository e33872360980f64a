"""Finds the route of a path."""

import re
from collections.abc import Iterable


class Paths:
    """The paths of a set of routes.

    Args:
        routes: paths of routes. A part in braces stands for any text without a slash.
    """

    def __init__(self, routes: Iterable[str]) -> None:
        self._routes = frozenset(routes)
        self._patterns = {route: _pattern(route) for route in self._routes if "{" in route}

    def route(self, path: str) -> str | None:
        """Return the route of a path; None if there is none."""
        if path in self._routes:
            return path
        return next((route for route, p in self._patterns.items() if p.fullmatch(path)), None)


def _pattern(route: str) -> re.Pattern[str]:
    parts = re.split(r"\{.*?\}", route)
    return re.compile("[^/]+".join(map(re.escape, parts)))
