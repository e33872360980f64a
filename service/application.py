"""The HTTP application: the routes of all protocols, and the middleware around them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cloze.model_store.installation import DISTRIBUTION
from cloze.service.core import ServiceError
from cloze.service.http.access_log import AccessLog
from cloze.service.http.connection import Connection, DirectRoutes
from cloze.service.http.errors import STATUS
from cloze.service.http.openapi import document
from cloze.service.http.page import ASSETS, docs_handler, part_handlers
from cloze.service.http.routes import JSON, Handler, Route
from cloze.service.protocols import ErrorResponder, ProtocolContext, WireProtocol
from cloze.service.tracing import Tracing

_TITLE = "Cloze"
_DESCRIPTION = "Fill-mask, embeddings, next sentence and question answering by encoders."


def create_app(
    context: ProtocolContext,
    routes: Sequence[Route],
    protocols: Sequence[WireProtocol],
    access_log: AccessLog,
    protect: Callable[[FastAPI], None],
    tracing: Tracing | None,
) -> FastAPI:
    """Return the HTTP application: the routes, and the documentation pages.

    Args:
        context: the parts of the service that routes use.
        routes: the routes.
        protocols: the protocols, which write errors.
        access_log: logs answered requests.
        protect: adds the middleware that decides who may send requests.
        tracing: makes the spans of requests; None: there are none.
    """
    app = FastAPIOffline(
        title=_TITLE,
        docs_url=None,
        redoc_url=None,
        static_url=ASSETS,
        # By default, FastAPI checks at every request whether each kind of telemetry is installed.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    for path, handlers in _by_path(routes).items():
        app.add_route(path, _by_method(handlers), methods=list(handlers))
    parts = part_handlers()
    app.openapi = _openapi(routes)  # type: ignore[method-assign]
    # FastAPI's own route writes the document again for each request, on the event loop.
    app.router.routes[:] = [r for r in app.routes if getattr(r, "path", "") != "/openapi.json"]
    pages = {"/docs": docs_handler(_TITLE), "/openapi.json": _openapi_handler(app.openapi)}
    for path, handler in (parts | pages).items():
        app.add_route(path, handler, methods=["GET"])
    _create_request_series(context, routes)
    responder = ErrorResponder(protocols)
    for error_type in (ServiceError, HTTPException, Exception):
        app.add_exception_handler(error_type, responder.respond)
    direct = {r.path: r.handler for r in routes if r.models is not None and "{" not in r.path}
    app.add_middleware(DirectRoutes, handlers=direct, respond=responder.respond)
    protect(app)
    known_routes = ("/docs", "/openapi.json", *parts, *(route.path for route in routes))
    app.add_middleware(
        Connection,
        known_routes=known_routes,
        respond=responder.respond,
        metrics=context.metrics,
        access_log=access_log,
        answers=context.watch.answers,
        tracing=tracing,
    )
    return app


def _by_path(routes: Sequence[Route]) -> dict[str, dict[str, Handler]]:
    """Return the handlers by path and method."""
    by_path: dict[str, dict[str, Handler]] = {}
    for route in routes:
        by_path.setdefault(route.path, {})[route.method] = route.handler
    return by_path


def _by_method(handlers: Mapping[str, Handler]) -> Handler:
    """Return the handler of a path. One route per path, so that ``Allow`` names every method."""
    if len(handlers) == 1:
        return next(iter(handlers.values()))

    async def answer(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return answer


def _create_request_series(context: ProtocolContext, routes: Sequence[Route]) -> None:
    """Create the metric series of results and of the server's own errors, which start from zero.

    Each series has a line per bucket in every scrape, so the clients' errors get theirs when the
    first one occurs.
    """
    own = {status for status, _ in STATUS.values() if status >= 500 or status == 429}
    statuses = sorted({200, *own})
    for route in routes:
        references = [model.reference for model in route.models or ()]
        context.metrics.create_request_series(route.path, references, statuses)


def _openapi(routes: Sequence[Route]) -> Callable[[], dict[str, Any]]:
    return lambda: document(_TITLE, version(DISTRIBUTION), _DESCRIPTION, routes)


def _openapi_handler(make_document: Callable[[], dict[str, Any]]) -> Handler:
    """Return the handler of the document, which is written once, on a thread."""
    written = lru_cache(1)(lambda: orjson.dumps(make_document()))

    async def answer(_: Request) -> Response:
        return Response(await asyncio.to_thread(written), media_type=JSON)

    return answer
