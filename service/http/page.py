"""The page at ``/``, on which people try the tasks: plain files that use the routes as any client.

The page loads nothing from another address. Its content security policy forbids that, too.
"""

from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from cloze.service.http.routes import HTML, Handler

_FOLDER: Final = Path(__file__).parents[1] / "page"

_FILES: Final = {
    "/page/style.css": ("style.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/panels.js": ("panels.js", "text/javascript"),
    "/page/elements.js": ("elements.js", "text/javascript"),
    "/page/live.js": ("live.js", "text/javascript"),
}
"""File and media type of each path of a part of the page."""

_HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

PAGE_HEADERS: Final = dict.fromkeys(_HEADERS, ("string", "what browsers may do with the page"))
"""The documentation of the headers."""


def page_handler() -> Handler:
    """Return the handler of the page itself."""
    return _handler("index.html", HTML)


def part_handlers() -> dict[str, Handler]:
    """Return a handler for GET requests per path of a part of the page."""
    return {path: _handler(*file) for path, file in _FILES.items()}


def _handler(name: str, media_type: str) -> Handler:
    content = (_FOLDER / name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return answer
