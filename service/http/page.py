"""The page at ``/``, on which people try the tasks: plain files that use the routes as any client.

The page loads nothing from another address. Its content security policy forbids that, too.
"""

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

from fastapi.openapi.docs import get_swagger_ui_html
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


ASSETS: Final = "/docs/assets"
"""Path under which the files of Swagger UI lie."""

_SWAGGER: Final = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")


def docs_paths() -> tuple[str, ...]:
    """Return the paths of the documentation of the API."""
    return ("/docs", *(f"{ASSETS}/{name}" for name in _SWAGGER))


def docs_handler(title: str) -> Handler:
    """Return the handler of the documentation of the API, by Swagger UI.

    The policy allows the page's own script by its hash. Swagger UI writes style attributes.
    """
    script, style, icon = (f"{ASSETS}/{name}" for name in _SWAGGER)
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title=title,
        swagger_js_url=script,
        swagger_css_url=style,
        swagger_favicon_url=icon,
    )
    inline = re.findall(rb"<script>(.*?)</script>", bytes(page.body), re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in inline]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    policy = (
        f"default-src 'none'; script-src 'self' {allowed}; style-src 'self' 'unsafe-inline'; "
        "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = _HEADERS | {"content-security-policy": policy}

    async def answer(_: Request) -> Response:
        return Response(bytes(page.body), headers=headers, media_type=HTML)

    return answer


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
