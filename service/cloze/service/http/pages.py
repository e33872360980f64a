"""What people open in a browser: the page at ``/``, and the documentation of the API.

Both are plain files, which use the routes as any client. They load nothing from another address,
and their content security policy forbids that, too. The OpenAPI document is written from the types
that validate the bodies.

All addresses in pages are relative, so that a proxy may have the server below any path. Only at
that path itself, without a slash at its end, a page must say what they are relative to.
"""

import re
from collections.abc import Iterable, Sequence, Set
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import orjson
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.http.routes import HTML, JSON, NPY, RAW, ROOT_PATH, Handler, Route
from cloze.service.settings import PATH

_FOLDER: Final = Path(__file__).parents[1] / "page"

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SWAGGER_POLICY: Final = _POLICY.replace("style-src", "style-src 'unsafe-inline'").replace(
    "img-src", "img-src 'self'"
)
"""Swagger UI writes style attributes, and has images of its own."""

PREFIX: Final = "x-forwarded-prefix"

_HEADERS: Final = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "vary": f"{PREFIX}, accept",
    "x-content-type-options": "nosniff",
}

PAGE_HEADERS: Final = dict.fromkeys(_HEADERS, ("string", "what browsers may do with the page"))
"""The documentation of the headers."""

ASSETS: Final = "/docs/assets"
"""Path under which the files of Swagger UI lie."""

ASSET_PATHS: Final = tuple(
    f"{ASSETS}/{name}" for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
)
"""Paths of the files that the documentation of the API loads."""

_REF = "#/components/schemas/{model}"

_KEY: Final = {"type": "http", "scheme": "bearer", "description": "a key of this server"}

_HERE: Final = "."
"""The server's address, relative to the OpenAPI document, which may lie below a proxy's path."""

MODEL = ("string", "the model that answered, NAME@VERSION; absent if none was chosen")
REQUEST_ID = ("string", "the id of the request: the client's own `X-Request-Id`, or a random one")
ERROR_CODE = ("string", "the stable code of the error, which the API's documentation lists")
_ERROR_HEADERS = {
    415: {"accept-encoding": ("string", "the content encodings that the server reads")},
    429: {
        "retry-after": ("integer", "whole seconds after which the request is admitted"),
        "retry-after-ms": ("integer", "the same in milliseconds"),
    },
}


_LONGEST_PREFIX: Final = 200
"""Most characters of ``X-Forwarded-Prefix`` that are read."""


def public_path(request: Request) -> str:
    """Return the path below which the client of a request sees the server; "" if nothing says so.

    ``X-Forwarded-Prefix`` precedes the setting `root_path`. The prefixes of several proxies are
    separated by commas, the outermost first. A value that is no path is ignored. Any client may
    send the header, so it changes only what a page says to that client.
    """
    stated = request.headers.get(PREFIX, "")[: _LONGEST_PREFIX + 1]
    prefix = "".join(part.strip().rstrip("/") for part in stated.split(","))
    if len(stated) <= _LONGEST_PREFIX and prefix and re.fullmatch(PATH, prefix):
        return prefix
    return str(request.scope.get(ROOT_PATH, ""))


def _handler(name: str, media_type: str, policy: str = _POLICY) -> Handler:
    content = (_FOLDER / name).read_bytes()
    headers = _HEADERS | {"content-security-policy": policy}

    async def answer(request: Request) -> Response:
        shown, sent = content, headers
        if media_type == HTML and (path := public_path(request)):
            base = f'<head>\n  <base href="{path}/">'.encode()
            shown = content.replace(b"<head>", base, 1)
            allowed = policy.replace("base-uri 'none'", "base-uri 'self'")
            sent = headers | {"content-security-policy": allowed}
        return Response(shown, headers=sent, media_type=media_type)

    return answer


PAGE: Final = _handler("index.html", HTML)
"""The handler of the page itself."""

PARTS: Final = {
    "/docs": _handler("docs.html", HTML, _SWAGGER_POLICY),
    "/page/style.css": _handler("style.css", "text/css"),
    **{
        f"/page/{name}.js": _handler(f"{name}.js", "text/javascript")
        for name in ("docs", "page", "panels", "elements", "live")
    },
}
"""A handler for GET requests per path of a page, or of a part of one."""


def answer_headers(routes: Sequence[Route]) -> list[str]:
    """Return the documented headers of the answers of routes, errors included."""
    documented = [{**route.doc.headers, **_common(route)} for route in routes]
    documented.append({"x-error-code": ERROR_CODE})
    return sorted({name for names in (*documented, *_ERROR_HEADERS.values()) for name in names})


def document(
    title: str,
    version: str,
    description: str,
    routes: Sequence[Route],
    without_key: Set[str] | None = None,
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of routes.

    `without_key` has the paths whose GET needs no API key; None: no request needs one.
    """
    schemas, definitions = _schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, schemas)
        if without_key is not None and (route.method != "GET" or route.path not in without_key):
            operation["security"] = [{"key": []}]
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    schemes = {} if without_key is None else {"securitySchemes": {"key": _KEY}}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "description": description},
        "servers": [{"url": _HERE}],
        "paths": paths,
        "components": {"schemas": definitions} | schemes,
    }


def at_path(written: bytes, path: str) -> bytes:
    """Return the JSON of an OpenAPI document whose server is below a path."""
    if not path:
        return written
    here = orjson.dumps({"servers": [{"url": _HERE}]})[1:-1]
    return written.replace(here, orjson.dumps({"servers": [{"url": path}]})[1:-1], 1)


def _schemas(routes: Iterable[Route]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return the schemas by (method, path, part), and the definitions that the schemas refer to."""
    inputs: list[Any] = []
    for route in routes:
        parts = {"body": route.doc.body, "result": route.doc.result, "error": route.doc.error_body}
        for part, annotation in parts.items():
            if annotation is not None:
                mode = "validation" if part == "body" else "serialization"
                inputs.append(((route.method, route.path, part), mode, TypeAdapter(annotation)))
    schemas, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    by_part = {key: schema for (key, _), schema in schemas.items()}
    return by_part, definitions.get("$defs", {})


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    doc = route.doc
    headers = {**_common(route), **doc.headers}
    success: dict[str, Any] = {"description": "Success", "headers": _headers(headers)}
    content = {}
    if doc.result is not None:
        content[JSON] = {"schema": schemas[route.method, route.path, "result"]}
    for media_type in doc.media_types:
        binary = {"format": "binary"} if media_type in (RAW, NPY) else {}
        content[media_type] = {"schema": {"type": "string"} | binary}
    if content:
        success["content"] = content
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-z0-9]+', '_', route.path)}",
        "summary": doc.summary,
        "tags": [doc.tag],
        "responses": {str(doc.status): success}
        | {str(s): _error(s, route, schemas) for s in doc.errors or ()},
    }
    if names := re.findall(r"\{(\w+)\}", route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if doc.body is not None:
        body = {"schema": schemas[route.method, route.path, "body"]}
        if doc.examples:
            body["examples"] = {title: {"value": one} for title, one in doc.examples.items()}
        operation["requestBody"] = {"required": True, "content": {JSON: body}}
    return operation


def _common(route: Route) -> dict[str, tuple[str, str]]:
    return {"x-request-id": REQUEST_ID} | ({"x-model": MODEL} if route.doc.body else {})


def _error(status: int, route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    closed = "Client closed its connection"
    return {
        "description": closed if status == 499 else HTTPStatus(status).phrase,
        "headers": _headers(
            {"x-error-code": ERROR_CODE, **_common(route), **_ERROR_HEADERS.get(status, {})}
        ),
        "content": {JSON: {"schema": schemas[route.method, route.path, "error"]}},
    }


def _headers(headers: dict[str, tuple[str, str]]) -> dict[str, Any]:
    return {
        name: {"description": description, "schema": {"type": kind}}
        for name, (kind, description) in headers.items()
    }
