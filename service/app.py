"""Composes the service: models, pipelines, metrics and the HTTP application.

`single_process` runs the engines in this process; `front_end` connects to engines in other
processes.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from cloze.model_store import Bundle
from cloze.model_store.installation import DISTRIBUTION
from cloze.service.core import ServiceError
from cloze.service.http.access import AccessControl, accepted_hosts
from cloze.service.http.access_log import AccessLog
from cloze.service.http.caller import Callers
from cloze.service.http.connection import Connection, DirectRoutes
from cloze.service.http.errors import STATUS
from cloze.service.http.gate import Gate, GateLimits, GateModel
from cloze.service.http.keys import Keys, Scope
from cloze.service.http.openapi import document
from cloze.service.http.page import ASSETS, docs_handler, docs_paths, part_handlers
from cloze.service.http.routes import Handler, Route
from cloze.service.http.watch import RequestWatch
from cloze.service.metrics import Metrics
from cloze.service.pipeline import Models, Pipeline
from cloze.service.protocols import (
    PROTOCOLS,
    ApiLimits,
    ErrorResponder,
    ProtocolContext,
    WireProtocol,
    operations,
)
from cloze.service.served_models import (
    EngineCallbacks,
    EngineFactory,
    ServedModel,
    local_models,
    open_bundles,
)
from cloze.service.settings import Settings
from cloze.service.tasks import TASKS, Task, TaskLimits

_JOIN_TIMEOUT_S = 5.0
"""Longest wait in `Service.close` for the threads of all models.

Threads that still run after this time are abandoned.
"""

_TITLE = "Cloze"
_DESCRIPTION = "Fill-mask, embeddings, next sentence and question answering by BERT and DistilBERT."


@dataclass(frozen=True, slots=True)
class Registries:
    """The tasks, by name, and the protocols that a service offers."""

    tasks: Mapping[str, Task]
    protocols: Sequence[WireProtocol]


DEFAULT_REGISTRIES = Registries(TASKS, PROTOCOLS)


class RemoteEngines(Protocol):
    """A front end's connections to engines in other processes."""

    def models(self, bundles: Sequence[Bundle]) -> list[ServedModel]:
        """Return the served models, in the order of their bundles."""
        ...


def single_process(
    settings: Settings,
    make_engine: EngineFactory | None = None,
    registries: Registries = DEFAULT_REGISTRIES,
) -> "Service":
    """Return a service whose engines run in this process.

    Args:
        settings: the operator's settings.
        make_engine: opens a bundle's engine; None selects `OnnxEngine`.
        registries: the tasks and protocols to offer.

    Raises:
        StartupError: the store is empty, a bundle does not open, or the device is missing.
    """
    bundles = open_bundles(settings)
    metrics = _make_metrics(bundles, shared=False)
    callbacks = EngineCallbacks(metrics.observe_batch)
    models = local_models(settings, bundles, callbacks, make_engine)
    return Service(settings, models, metrics, registries)


def front_end(settings: Settings, engines: RemoteEngines) -> "Service":
    """Return a service whose engines run in other processes, which a supervisor restarts.

    Args:
        settings: the operator's settings.
        engines: the connections to the engine processes.

    Raises:
        StartupError: the store is empty, or a bundle does not open.
    """
    bundles = open_bundles(settings)
    metrics = _make_metrics(bundles, shared=True)
    return Service(settings, engines.models(bundles), metrics, DEFAULT_REGISTRIES)


def _make_metrics(bundles: Sequence[Bundle], *, shared: bool) -> Metrics:
    return Metrics([bundle.manifest.reference for bundle in bundles], shared=shared)


class Service:
    """The served models and the state of one process that answers HTTP.

    Args:
        settings: the operator's settings.
        models: the served models, in the order of preference.
        metrics: the metrics of this process, or of all processes of a server.
        registries: the tasks and protocols to offer.
    """

    def __init__(
        self,
        settings: Settings,
        models: Sequence[ServedModel],
        metrics: Metrics,
        registries: Registries,
    ) -> None:
        self._settings = settings
        self._registries = registries
        self._metrics = metrics
        self._draining = False
        pipelines = [Pipeline(model, _task_limits(settings, model)) for model in models]
        self.models = Models(pipelines, registries.tasks.values(), settings.default_models())
        callers = Callers(
            settings.trusted_proxies, Keys(settings.keys_file) if settings.keys_file else None
        )
        self._callers = callers
        self._context = self._protocol_context(callers)
        self._routes = [r for p in registries.protocols for r in p.routes(self._context)]
        self._access_log = AccessLog(
            settings.log_format,
            logging.getLevelName(settings.log_level.upper()),
            settings.access_log_share,
            operations.QUIET_ROUTES,
        )
        self.gate = self._make_gate(callers)
        metrics.watch(self)

    def _protocol_context(self, callers: Callers) -> ProtocolContext:
        settings = self._settings
        timeout_s, most_s = settings.request_timeout_ms / 1000, settings.max_timeout_s
        return ProtocolContext(
            self._registries.tasks,
            self.models,
            self._metrics,
            self,
            ApiLimits(settings.max_request_bytes, settings.max_request_texts),
            RequestWatch(timeout_s, most_s, callers),
        )

    def _make_gate(self, callers: Callers) -> Gate:
        """Return the gate of the routes that run models."""
        routes = {}
        for route in self._routes:
            if route.task is not None:
                serving = self.models.serving(self._registries.tasks[route.task])
            elif route.runs_models:
                serving = self.models.pipelines
            else:
                continue
            routes[route.path] = [GateModel(p.manifest.reference, p.model.queue) for p in serving]
        limits = GateLimits(self._settings.max_queue_wait_ms / 1000, self._settings.max_timeout_s)
        error_bytes = ErrorResponder(self._registries.protocols).body
        return Gate(routes, error_bytes, limits, callers, self._metrics, self._access_log)

    @property
    def restarts_engines(self) -> bool:
        """Whether a supervisor restarts a dead engine."""
        return self._metrics.shared

    @property
    def dead(self) -> str | None:
        """Why an engine is dead; None while all engines run."""
        reasons = (pipeline.model.queue.dead for pipeline in self.models.pipelines)
        return next((reason for reason in reasons if reason is not None), None)

    @property
    def draining(self) -> bool:
        """Whether the service refuses new requests."""
        return self._draining

    @property
    def ready(self) -> bool:
        """Whether the service admits requests."""
        return not self._draining and self.dead is None

    def queued_tokens(self) -> dict[str, int]:
        """Return the number of queued tokens per model."""
        pipelines = self.models.pipelines
        return {p.manifest.reference: p.model.queue.queued_tokens for p in pipelines}

    def api(self) -> FastAPI:
        """Return the HTTP application; the service closes when the application shuts down."""
        app = create_app(
            self._context,
            self._routes,
            self._registries.protocols,
            self._access_log,
            self.gate,
            self._protect,
        )

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield
            # Requests may occupy all threads of the loop's default executor.
            with ThreadPoolExecutor(1) as executor:
                await asyncio.get_running_loop().run_in_executor(executor, self.close)

        app.router.lifespan_context = lifespan
        return app

    def _protect(self, app: FastAPI) -> None:
        """Add the checks of keys and hosts, and CORS, if the settings ask for them."""
        settings = self._settings
        hosts = accepted_hosts(settings.host, settings.allowed_hosts)
        if hosts or self._callers.keys is not None:
            app.add_middleware(
                AccessControl,
                callers=self._callers,
                open_routes=frozenset(
                    {*operations.PROBES, "/", "/openapi.json", *docs_paths(), *part_handlers()}
                ),
                scopes=(("/metrics", Scope.METRICS), ("/admin/", Scope.ADMIN)),
                hosts=hosts,
                respond=ErrorResponder(self._registries.protocols).respond,
            )
        if settings.cors_origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=[
                    "authorization",
                    "content-type",
                    "x-request-id",
                    "x-request-timeout-ms",
                ],
                expose_headers=["x-request-id", "x-model", "x-truncated", "retry-after"],
            )

    def drain(self) -> None:
        """Stop admitting requests; accepted requests are still answered."""
        self._draining = True
        for pipeline in self.models.pipelines:
            pipeline.model.queue.drain()

    def close(self) -> None:
        """Fail pending requests and end all threads."""
        self._draining = True
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        for pipeline in self.models.pipelines:
            pipeline.model.queue.close(max(0.0, deadline - time.monotonic()))


def _task_limits(settings: Settings, model: ServedModel) -> TaskLimits:
    return TaskLimits(
        max_tokens=model.bundle.manifest.limits.max_tokens,
        max_masks=settings.max_masks,
        max_top_k=settings.max_top_k,
        max_results=settings.max_request_results,
        max_request_tokens=settings.max_request_tokens,
        max_text_characters=settings.max_text_characters,
        max_request_texts=settings.max_request_texts,
    )


def create_app(
    context: ProtocolContext,
    routes: Sequence[Route],
    protocols: Sequence[WireProtocol],
    access_log: AccessLog,
    gate: Gate,
    protect: Callable[[FastAPI], None],
) -> FastAPI:
    """Return the HTTP application: the routes, and the documentation pages.

    Args:
        context: the parts of the service that routes use.
        routes: the routes.
        protocols: the protocols, which write errors.
        access_log: logs answered requests.
        gate: counts the requests that it has admitted.
        protect: adds the middleware that decides who may send requests.
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
    for path, handler in (parts | {"/docs": docs_handler(_TITLE)}).items():
        app.add_route(path, handler, methods=["GET"])
    _create_request_series(context, routes)
    responder = ErrorResponder(protocols)
    for error_type in (ServiceError, HTTPException, Exception):
        app.add_exception_handler(error_type, responder.respond)
    app.openapi = _openapi(routes)  # type: ignore[method-assign]
    task_handlers = {route.path: route.handler for route in routes if route.task is not None}
    app.add_middleware(DirectRoutes, handlers=task_handlers, respond=responder.respond)
    protect(app)
    known_routes = ("/docs", "/openapi.json", *parts, *(route.path for route in routes))
    app.add_middleware(
        Connection,
        known_routes=known_routes,
        metrics=context.metrics,
        access_log=access_log,
        gate=gate,
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
        if route.task is not None:
            serving = context.models.serving(context.tasks[route.task])
            references = [pipeline.manifest.reference for pipeline in serving]
            context.metrics.create_request_series(route.path, references, statuses)


def _openapi(routes: Sequence[Route]) -> Callable[[], dict[str, Any]]:
    return lambda: document(_TITLE, version(DISTRIBUTION), _DESCRIPTION, routes)
