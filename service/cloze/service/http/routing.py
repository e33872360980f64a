"""The application of a set of routes: who may ask, the router, and the documentation."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Final

import orjson
from starlette.endpoints import HTTPEndpoint
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from cloze.model_store.installation import DISTRIBUTION
from cloze.service.errors import ServiceError
from cloze.service.http.door import Door, Gate
from cloze.service.http.pages import (
    ASSET_PATHS,
    ASSETS,
    PARTS,
    PREFIX,
    answer_headers,
    at_path,
    document,
    public_path,
)
from cloze.service.http.record import Access
from cloze.service.http.routes import JSON, Handler, Respond, Route
from cloze.service.threads import run_on_thread

_DESCRIPTION: Final = "Vectors, masks, labels, entities, answers and rankings by encoders."

PAGES: Final = ("/openapi.json", *PARTS)
"""Paths that the application answers besides the routes of protocols."""

OPEN_PAGES: Final = frozenset({"/", "/openapi.json", *ASSET_PATHS, *PARTS})
"""Paths of pages without data, which need no key."""


def create_app(
    routes: Sequence[Route],
    access: Access,
    gate: Gate,
    respond: Respond,
    cors_origins: Sequence[str],
) -> ASGIApp:
    """Return the application that answers the routes and the pages to those who may ask.

    `respond` writes the response to an error.
    """
    pages = {**PARTS, "/openapi.json": _openapi_handler(routes, access)}
    direct = {("GET", path): handler for path, handler in pages.items()}
    direct |= {(r.method, r.path): r.handler for r in routes if "{" not in r.path}
    app: ASGIApp = Door(access, gate, _router(routes, pages, respond), direct, respond)
    if not cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # clients have headers of their own, for example openai's
        expose_headers=answer_headers([route for route in routes if route.models is not None]),
    )


def _router(routes: Sequence[Route], pages: Mapping[str, Handler], respond: Respond) -> ASGIApp:
    """Return the application of what the door does not answer; FastAPI takes 0.1 s to import."""
    app: ASGIApp | None = None

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal app
        if app is None:  # two first requests may both make one
            app = await run_on_thread(_fastapi, routes, pages, respond)
        await app(scope, receive, send)

    return answer


def _fastapi(routes: Sequence[Route], pages: Mapping[str, Handler], respond: Respond) -> ASGIApp:
    """Return the application that answers the routes and the pages, by their paths."""
    from fastapi import FastAPI

    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # FastAPI's own route would write the document again for each request
        redirect_slashes=False,  # its address would lack a proxy's scheme and path
        # By default, FastAPI checks at every request whether each kind of telemetry is installed.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    by_path: dict[str, dict[str, Handler]] = {}
    for route in routes:
        by_path.setdefault(route.path, {})[route.method] = route.handler
    for path, handler in pages.items():
        by_path[path] = {"GET": handler}
    # The first path that fits a request has it: ``/v1/models/own``, which may be a route of the
    # settings, before ``/v1/models/{model}:predict``, and that before ``/v1/models/{model}``.
    for path, handlers in sorted(
        by_path.items(), key=lambda row: ("{" in row[0], row[0].endswith("}"))
    ):
        functions = {method.lower(): staticmethod(handler) for method, handler in handlers.items()}
        # One route per path, so that ``Allow`` names every method.
        app.add_route(path, type("_Path", (HTTPEndpoint,), functions), methods=list(handlers))
    for path, handlers in by_path.items():
        if path != "/":
            app.add_route(f"{path}/", _without_slash, methods=list(handlers))
    app.mount(ASSETS, StaticFiles(packages=[("fastapi_offline", "static")]))
    for error_type in (ServiceError, HTTPException, Exception):
        app.add_exception_handler(error_type, respond)
    return app


async def _without_slash(request: Request) -> Response:
    """Redirect to the same path without the slash at its end, by a relative address."""
    path, query = request.scope["path"], request.scope["query_string"].decode("latin-1")
    address = "../" + path.removesuffix("/").rpartition("/")[2]
    return RedirectResponse(f"{address}?{query}" if query else address)


def _openapi_handler(routes: Sequence[Route], access: Access) -> Handler:
    """Return the handler of the OpenAPI document, which is written once, on a thread."""

    @lru_cache(1)
    def written() -> bytes:
        without_key = access.open_routes if access.needs_keys else None
        made = document("Cloze", version(DISTRIBUTION), _DESCRIPTION, routes, without_key)
        return orjson.dumps(made)

    async def answer(request: Request) -> Response:
        content = at_path(await asyncio.to_thread(written), public_path(request))
        return Response(content, headers={"vary": PREFIX}, media_type=JSON)

    return answer
