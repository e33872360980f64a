"""Composes the service: models, pipelines, metrics and the HTTP application.

`single_process` runs the engines in this process; `front_end` connects to engines in other
processes. `Service.reopened` serves what the store holds by then, with the engines that stay.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from cloze.model_store import Bundle
from cloze.service.application import create_app
from cloze.service.batching.promises import Promises
from cloze.service.core import Changes, Reload, ReloadRefused
from cloze.service.http.access import AccessControl, accepted_hosts
from cloze.service.http.access_log import AccessLog
from cloze.service.http.answers import Answers
from cloze.service.http.caller import Callers
from cloze.service.http.gate import Gate, GateLimits
from cloze.service.http.keys import Keys, Scope
from cloze.service.http.memory_limit import MemoryLimit
from cloze.service.http.page import docs_paths, part_handlers
from cloze.service.http.starts import Starts
from cloze.service.http.watch import RequestWatch
from cloze.service.metrics import Metrics, ModelInfo, QueueState
from cloze.service.pipeline import Models, Pipeline, task_limits
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
    LocalModels,
    ServedModel,
    open_bundles,
)
from cloze.service.settings import Settings
from cloze.service.tasks import TASKS, Task
from cloze.service.tracing import Tracing, make_tracing, with_spans

_JOIN_TIMEOUT_S = 5.0
"""Longest wait in `Service.close` for the threads of all models.

Threads that still run after this time are abandoned.
"""


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
    metrics = Metrics()
    tracing = make_tracing(settings, operations.QUIET_ROUTES)
    callbacks = EngineCallbacks(with_spans(metrics.observe_batch, tracing))
    opener = LocalModels(settings, callbacks, make_engine)
    return Service(Process(settings, metrics, registries, opener, tracing), opener.open(bundles))


def front_end(settings: Settings, engines: RemoteEngines) -> "Service":
    """Return a service whose engines run in other processes, which a supervisor restarts.

    Args:
        settings: the operator's settings.
        engines: the connections to the engine processes.

    Raises:
        StartupError: the store is empty, or a bundle does not open.
    """
    bundles = open_bundles(settings)
    tracing = make_tracing(settings, operations.QUIET_ROUTES)
    process = Process(settings, Metrics(shared=True), DEFAULT_REGISTRIES, None, tracing)
    return Service(process, engines.models(bundles))


class Process:
    """The parts of a process that stay when it serves other models.

    Args:
        settings: the operator's settings.
        metrics: the metrics of this process, or of all processes of a server.
        registries: the tasks and protocols to offer.
        opener: opens engines in this process; None: other processes have the engines.
        tracing: makes the spans of requests; None: there are none.

    Attributes:
        reload: does what an operator asks for by ``POST /admin/reload``; None: nothing can.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        registries: Registries,
        opener: LocalModels | None,
        tracing: Tracing | None = None,
    ) -> None:
        self.settings, self.metrics = settings, metrics
        self.registries, self.opener, self.tracing = registries, opener, tracing
        keys = Keys(settings.keys_file) if settings.keys_file else None
        self.callers = Callers(settings.trusted_proxies, keys)
        self.access_log = AccessLog(
            settings.log_format,
            logging.getLevelName(settings.log_level.upper()),
            settings.access_log_share,
            operations.QUIET_ROUTES,
        )
        wait_s = settings.max_queue_wait_ms / 1000
        self.bodies = MemoryLimit("bodies", settings.max_bodies_bytes, wait_s)
        self.answers = Answers(settings.max_answers_bytes)
        self.starts = Starts()
        self.promises = Promises()
        self.reload: Reload | None = None


class Service:
    """The served models and the state of one process that answers HTTP.

    Args:
        process: the parts of the process that do not depend on the models.
        models: the served models, in the order of preference.
    """

    def __init__(self, process: Process, models: Sequence[ServedModel]) -> None:
        self._process = process
        self._settings, self._registries = process.settings, process.registries
        self._draining = False
        pipelines = [
            Pipeline(model, task_limits(self._settings, model.bundle.manifest), process.promises)
            for model in models
        ]
        tasks = self._registries.tasks.values()
        self.models = Models(pipelines, tasks, self._settings.default_models())
        self._context = self._protocol_context(process.callers)
        self._routes = [r for p in self._registries.protocols for r in p.routes(self._context)]
        self.gate = self._make_gate(process.callers)

    def _protocol_context(self, callers: Callers) -> ProtocolContext:
        settings = self._settings
        timeout_s, most_s = settings.request_timeout_ms / 1000, settings.max_timeout_s
        return ProtocolContext(
            self._registries.tasks,
            self.models,
            self._process.metrics,
            self,
            ApiLimits.of(settings),
            RequestWatch(timeout_s, most_s, callers, self._process.bodies, self._process.answers),
        )

    def _make_gate(self, callers: Callers) -> Gate:
        """Return the gate of the routes that run models."""
        routes = {r.path: r.models for r in self._routes if r.models is not None}
        limits = GateLimits(self._settings.max_queue_wait_ms / 1000, self._settings.max_timeout_s)
        error_bytes = ErrorResponder(self._registries.protocols).body
        process = self._process
        return Gate(
            routes,
            error_bytes,
            limits,
            process.starts,
            process.promises,
            callers,
            process.metrics,
            process.access_log,
        )

    # ---- reload ---------------------------------------------------------------------------------

    @property
    def reopens(self) -> bool:
        """Whether `reopened` can open engines in this process."""
        return self._process.opener is not None

    def on_reload(self, reload: Reload) -> None:
        """Set what `reload` does, for this service and for those that replace it."""
        self._process.reload = reload

    async def reload(self) -> Changes:
        """Serve what the store, the keys and the certificate hold now.

        Raises:
            ReloadRefused: that cannot be served; what was served before is served on.
        """
        if self._process.reload is None:
            raise ReloadRefused("this server cannot reload")
        return await self._process.reload()

    def reopened(self) -> "Service":
        """Return a service of what the store and the keys hold now, with the engines that stay.

        This service keeps answering, and the metrics stay its own until the other one's `api` is
        called. `close_unused` ends what the other one does not use.

        Raises:
            StartupError: the keys cannot be read, or a bundle or an engine does not open.
        """
        process = self._process
        assert process.opener is not None
        bundles = open_bundles(self._settings)
        running = [pipeline.model for pipeline in self.models.pipelines]
        models = process.opener.open(bundles, running)
        try:
            reopened = Service(process, models)
            if process.callers.keys is not None:
                process.callers.keys.reload()  # last, since the keys are replaced at once
        except BaseException:
            for model in models:
                if all(model is not other for other in running):
                    model.queue.close()
            raise
        return reopened

    def changes(self, other: "Service") -> Changes:
        """Return how the models of another service differ from those of this one."""
        return Changes.between(self._by_name(), other._by_name())

    def close_unused(self, other: "Service") -> None:
        """Close the models that another service does not use, and remove their metric series."""
        used = {id(model) for model in other._by_name().values()}
        self._close([p for p in self.models.pipelines if id(p.model) not in used])
        self._process.metrics.forget_models(self._by_name().keys() - other._by_name().keys())

    def _by_name(self) -> dict[str, ServedModel]:
        """Return the served models by their full names."""
        return {pipeline.manifest.reference: pipeline.model for pipeline in self.models.pipelines}

    # ---- state ----------------------------------------------------------------------------------

    @property
    def answers(self) -> Answers:
        """The answers of this process that are not read yet."""
        return self._process.answers

    @property
    def starts(self) -> Starts:
        """The requests of this process that have not started."""
        return self._process.starts

    @property
    def restarts_engines(self) -> bool:
        """Whether a supervisor restarts a dead engine."""
        return self._process.metrics.shared

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

    def queues(self) -> dict[str, QueueState]:
        """Return the state of the queue of each model, by its full name."""
        queues = ((p.manifest.reference, p.model.queue) for p in self.models.pipelines)
        return {name: QueueState(queue.queued_tokens, queue.backlog_s) for name, queue in queues}

    def model_infos(self) -> list[ModelInfo]:
        """Return what is constant of each model."""
        return [
            ModelInfo(
                pipeline.manifest.reference,
                {
                    "family": pipeline.manifest.architecture.family,
                    "precision": pipeline.model.precision(),
                    "tasks": ",".join(self.models.tasks_of(pipeline)),
                },
            )
            for pipeline in self.models.pipelines
        ]

    def api(self) -> FastAPI:
        """Return the HTTP application; the service closes when the application shuts down.

        From now on, the metrics are those of this service and its models.
        """
        self._process.metrics.add_models(self._by_name())
        self._process.metrics.watch(self)
        app = create_app(
            self._context,
            self._routes,
            self._registries.protocols,
            self._process.access_log,
            self._protect,
            self._process.tracing,
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
        callers = self._process.callers
        if hosts or callers.keys is not None:
            app.add_middleware(
                AccessControl,
                callers=callers,
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
                expose_headers=[
                    "x-request-id",
                    "x-model",
                    "x-truncated",
                    "retry-after",
                    "retry-after-ms",
                ],
            )

    def drain(self) -> None:
        """Stop admitting requests; accepted requests are still answered."""
        self._draining = True
        for pipeline in self.models.pipelines:
            pipeline.model.queue.drain()

    def close(self) -> None:
        """Fail pending requests, end all threads, and send the last spans."""
        self._draining = True
        self._close(self.models.pipelines)
        if self._process.tracing is not None:
            self._process.tracing.close()

    @staticmethod
    def _close(pipelines: Sequence[Pipeline]) -> None:
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        for pipeline in pipelines:
            pipeline.model.queue.close(max(0.0, deadline - time.monotonic()))
