"""What a reload replaces: the served models of one state of the store, and their application."""

import asyncio
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Final

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from cloze.model_store.installation import DISTRIBUTION
from cloze.service.adapters import AdapterBundle
from cloze.service.core import QueueState, ServiceError
from cloze.service.freed_memory import return_freed_memory
from cloze.service.http.gate import Gate, Paths
from cloze.service.http.keys import Permission
from cloze.service.http.pages import (
    ASSET_PATHS,
    ASSETS,
    answer_headers,
    document,
    part_handlers,
)
from cloze.service.http.record import Access, accepted_hosts
from cloze.service.http.routes import JSON, DirectRoutes, Handler, Respond, Route
from cloze.service.metrics import ModelInfo
from cloze.service.pipeline import Models
from cloze.service.protocols import operations
from cloze.service.served_models import ServedModel, close_models
from cloze.service.settings import Settings

_TITLE: Final = "Cloze"
_DESCRIPTION: Final = "Vectors, masks, labels, entities, answers and rankings by encoders."

PAGES: Final = ("/openapi.json", *part_handlers())
"""Paths that the application answers besides the routes of protocols."""

MOST_ADAPTER_SERIES = 32
"""Most adapters with metrics of their own: each has about a hundred series."""

_COLLECT_AFTER_S = 1.0
"""Time after which the last connections of an old snapshot are gone, which refer to it in cycles.

A full collection is short, since `server` has frozen most other objects.
"""


@dataclass(slots=True, eq=False)
class Snapshot:
    """The models of one state of the store, and what follows from them.

    Attributes:
        routes: the routes of all protocols, which `app` answers besides `PAGES`.
        paths: the paths of the routes and of `PAGES`.
        running: number of requests that `app` has not answered.
    """

    models: Models
    gate: Gate
    app: ASGIApp
    routes: Sequence[Route]
    paths: Paths
    running: int = 0

    @property
    def by_name(self) -> dict[str, ServedModel]:
        """The served models by their full names."""
        return {pipeline.manifest.reference: pipeline.model for pipeline in self.models.pipelines}

    def metric_names(self) -> dict[str, str]:
        """Return the model in the metrics of each served model, by its full name.

        Further adapters than `MOST_ADAPTER_SERIES` count as their base.
        """
        names, adapters = {}, 0
        for pipeline in self.models.pipelines:
            bundle, name = pipeline.model.bundle, pipeline.reference
            if isinstance(bundle, AdapterBundle):
                adapters += 1
                if adapters > MOST_ADAPTER_SERIES:
                    name = bundle.base.manifest.reference
            names[pipeline.reference] = name
        return names

    def model_infos(self) -> list[ModelInfo]:
        """Return the labels of each served model that never change."""
        infos, names = [], self.metric_names()
        for pipeline in self.models.pipelines:
            if names[pipeline.reference] != pipeline.reference:
                continue
            labels = {
                "family": pipeline.manifest.architecture.family,
                "precision": pipeline.model.precision(),
                "tasks": ",".join(self.models.tasks_of[pipeline]),
            }
            infos.append(ModelInfo(pipeline.manifest.reference, labels))
        return infos

    def queues(self) -> dict[str, QueueState]:
        """Return the state of the queue of each model, by its full name."""
        names = self.metric_names()
        return {n: model.queue.state for n, model in self.by_name.items() if names[n] == n}

    def close_unused(self, other: "Snapshot") -> None:
        """Close the models that another snapshot does not use."""
        used = {id(model) for model in other.by_name.values()}
        close_models(model for model in self.by_name.values() if id(model) not in used)


def return_memory_later() -> None:
    """Return the memory of an old snapshot when its last connections are gone."""
    asyncio.get_running_loop().call_later(_COLLECT_AFTER_S, _return_memory)


def _return_memory() -> None:
    """Return the memory of an old snapshot to the operating system."""
    gc.collect()
    return_freed_memory()


def create_app(
    routes: Sequence[Route], settings: Settings, respond: Respond, *, needs_keys: bool
) -> ASGIApp:
    """Return the application that answers the routes and the pages to those who may ask.

    `respond` writes the response to an error.
    """
    direct = {r.path: r.handler for r in routes if r.models is not None and "{" not in r.path}
    pages = {"/", "/openapi.json", *ASSET_PATHS, *part_handlers()}
    access = Access(
        needs_keys=needs_keys,
        open_routes=operations.PROBES | pages,
        permissions=(("/metrics", Permission.METRICS), ("/admin/", Permission.ADMIN)),
        hosts=accepted_hosts(settings.host, settings.allowed_hosts),
        by_address=operations.QUIET_ROUTES,
    )
    app: ASGIApp = DirectRoutes(_router(routes, respond), direct, access, respond)
    if not settings.cors_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=settings.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # clients have headers of their own, for example openai's
        expose_headers=answer_headers([route for route in routes if route.models is not None]),
    )


def _router(routes: Sequence[Route], respond: Respond) -> FastAPI:
    """Return the application that answers the routes and the pages, by their paths."""
    app = FastAPI(
        title=_TITLE,
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
    pages = {"/openapi.json": _openapi_handler(routes)}
    for path, handler in (part_handlers() | pages).items():
        by_path[path] = {"GET": handler}
    for path, handlers in by_path.items():
        app.add_route(path, _by_method(handlers), methods=list(handlers))
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


def _by_method(handlers: Mapping[str, Handler]) -> Handler:
    """Return the handler of a path. One route per path, so that ``Allow`` names every method."""
    if len(handlers) == 1:
        return next(iter(handlers.values()))

    async def answer(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return answer


def _openapi_handler(routes: Sequence[Route]) -> Handler:
    """Return the handler of the OpenAPI document, which is written once, on a thread."""

    @lru_cache(1)
    def written() -> bytes:
        return orjson.dumps(document(_TITLE, version(DISTRIBUTION), _DESCRIPTION, routes))

    async def answer(_: Request) -> Response:
        return Response(await asyncio.to_thread(written), media_type=JSON)

    return answer
