"""The path of a request, and its route.

A path is never decoded: ``/%65mbed`` is another path than ``/embed``, and no route. So whatever
reads the path (the gate, the access control, the router, the metrics, and a proxy's rules before
them) reads the same one.
"""

import re
from collections.abc import Iterable

import httptools


def sent_path(target: bytes) -> str:
    """Return the path of a request as it was sent.

    Args:
        target: the target of the request line, for example ``/embed?x`` or ``http://host/embed``.

    Raises:
        httptools.HttpParserError: the target is no URL.
    """
    path: bytes = httptools.parse_url(target).path
    return path.decode("ascii")


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
