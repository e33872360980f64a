"""Composes the service.

`Service` holds what lives as long as the process. `Snapshot` holds what a reload replaces.
"""

import asyncio
import gc
import logging
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cloze.model_store import Bundle
from cloze.model_store.system import return_freed_memory
from cloze.service import errors
from cloze.service.batching.admission import WaitLimits
from cloze.service.batching.fair_queue import QueueState
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import Changes
from cloze.service.http.body import BodyLimits, RequestLimits
from cloze.service.http.bytes_held import ByteBudget
from cloze.service.http.certificate import Certificate
from cloze.service.http.door import Gate, StartQueue
from cloze.service.http.errors import STATUSES_FROM_ZERO
from cloze.service.http.keys import Keys, Permission, read_entries
from cloze.service.http.record import Access, Callers, Paths, Recorder, accepted_hosts
from cloze.service.http.returns import Returns
from cloze.service.http.routes import RECORD, ROOT_PATH, Connection, Route
from cloze.service.http.routing import OPEN_PAGES, PAGES, create_app
from cloze.service.machine import available_cpus
from cloze.service.models.adapters import AdapterBundle
from cloze.service.models.equal_work import EqualWork
from cloze.service.models.pipeline import Models, Pipeline, task_limits
from cloze.service.models.served_models import (
    EngineFactory,
    LocalModels,
    ServedModel,
    close_models,
    kept_reasons,
    open_bundles,
)
from cloze.service.observe.logs import AccessLog
from cloze.service.observe.metrics import Metrics
from cloze.service.observe.tracing import Tracing, make_tracing, with_spans
from cloze.service.protocols import ProtocolContext, error_response, operations, routes_of
from cloze.service.settings import Settings
from cloze.service.tasks import TASKS, Task
from cloze.service.text.tokenizer import Tokenizer
from cloze.service.threads import bound_threads

log = logging.getLogger("cloze")


def single_process(
    settings: Settings,
    make_engine: EngineFactory | None = None,
    tasks: Mapping[str, Task] = TASKS,
    bundles: Sequence[Bundle] | None = None,
) -> "Service":
    """Return a service whose engines run in this process.

    By default, the engines are `OnnxEngine`, and the bundles are those that the settings name.

    Raises:
        StartupError: the store is empty, a bundle does not open, or the device is missing; or the
            keys or the certificate cannot be read.
    """
    if bundles is None:
        bundles = open_bundles(settings).bundles
    # An error of the operator is found before the models take their time.
    Certificate(settings.tls_certificate, settings.tls_key).load()
    if settings.keys_file is not None:
        read_entries(settings.keys_file)
    metrics = Metrics()
    tracing = make_tracing(settings, operations.QUIET_ROUTES)
    on_batch = with_spans(metrics.observe_batch, tracing)
    opener = LocalModels(settings, make_engine, on_batch=on_batch)
    models = opener.open(bundles)
    try:
        return Service(settings, metrics, models, tasks, opener=opener, tracing=tracing)
    except BaseException:
        close_models(models)
        raise


MOST_ADAPTER_SERIES = 32
"""Most adapters with metrics of their own: each has about a hundred series."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """The models of one state of the store, and what follows from them."""

    models: Models
    gate: Gate
    app: ASGIApp
    routes: Sequence[Route]  # the routes of all protocols, which `app` answers besides `PAGES`
    paths: Paths  # the paths of the routes and of `PAGES`
    # The model in the metrics of each served model, by its full name.
    metric_names: Mapping[str, str]
    running: int = 0  # number of requests that `app` has not answered

    @property
    def by_name(self) -> dict[str, ServedModel]:
        """The served models by their full names."""
        return {pipeline.manifest.reference: pipeline.model for pipeline in self.models.pipelines}

    def model_infos(self) -> dict[str, dict[str, str]]:
        """Return the labels of each served model that never change, by its full name."""
        return {
            pipeline.reference: {
                "family": pipeline.manifest.architecture.family,
                "precision": pipeline.model.precision(),
                "tasks": ",".join(self.models.tasks_of[pipeline]),
            }
            for pipeline in self.models.pipelines
            if self.metric_names[pipeline.reference] == pipeline.reference
        }

    def queues(self) -> dict[str, QueueState]:
        """Return the state of the queue of each model, by its full name."""
        names = self.metric_names
        return {n: model.queue.state for n, model in self.by_name.items() if names[n] == n}

    def close_unused(self, other: "Snapshot") -> None:
        """Close the models that another snapshot does not use."""
        used = {id(model) for model in other.by_name.values()}
        close_models(model for model in self.by_name.values() if id(model) not in used)


def _metric_names(served: Sequence[ServedModel]) -> dict[str, str]:
    """Return the model in the metrics of each served model, by its full name.

    Further adapters than `MOST_ADAPTER_SERIES` count as their base.
    """
    bundles = [model.bundle for model in served]
    names = {bundle.manifest.reference: bundle.manifest.reference for bundle in bundles}
    adapters = [bundle for bundle in bundles if isinstance(bundle, AdapterBundle)]
    for adapter in adapters[MOST_ADAPTER_SERIES:]:
        names[adapter.manifest.reference] = adapter.base.manifest.reference
    return names


def _return_memory() -> None:
    gc.collect()
    return_freed_memory()


class Service:
    """An ASGI application, and the parts of its process that a reload keeps.

    A request ends with the snapshot that it began with, so no answer mixes two. A reload closes the
    models that only the old snapshot has after the last request of that snapshot. No other reload
    begins before: at most two snapshots are in memory.

    `begin` must come before the first request; an ASGI server calls it by the lifespan protocol.

    Args:
        metrics: the metrics of this process, or of all processes of a server.
        models: the served models, in the order of preference.
        opener: opens engines in this process; None: other processes have the engines, and a
            supervisor restarts them.

    Attributes:
        snapshot: answers new requests.
        certificate: the server's certificate, which a reload reads again.
        draining: whether readiness fails and reloads are refused; `drain` also admits no request.
        has_engines: whether the engines are in this process, which so can reload.

    Raises:
        StartupError: the keys or a tokenizer cannot be read, or a setting does not fit the models.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        models: Sequence[ServedModel],
        tasks: Mapping[str, Task] = TASKS,
        *,
        opener: LocalModels | None = None,
        tracing: Tracing | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        self._settings, self._metrics, self._tasks = settings, metrics, tasks
        self._opener, self._tracing, self._clock = opener, tracing, clock
        keys = Keys(settings.keys_file, clock) if settings.keys_file else None
        timeout_s = settings.request_timeout_ms / 1000
        self._callers = Callers(keys, settings.max_timeout_s, timeout_s, clock)
        self._quiet_routes = operations.QUIET_ROUTES | {settings.health_route}
        access_log = AccessLog(
            settings.log_format,
            logging.getLevelName(settings.log_level.upper()),
            settings.access_log_share,
            self._quiet_routes,
        )
        self._waits = WaitLimits.of(settings.max_queue_wait_ms, settings.request_timeout_ms)
        self._limits = RequestLimits(
            ByteBudget("bodies", settings.max_bodies_bytes, self._waits.longest_s),
            ByteBudget("unread answers", settings.max_answers_bytes),
            clock,
        )
        self._equal_work = EqualWork(settings.cache_mb * 2**20, clock)
        self._starts, self._returns = StartQueue(clock), Returns(max(1, settings.frontends))
        self._recorder = Recorder(
            metrics,
            access_log,
            tracing,
            self._limits,
            self._respond,
            lambda: self.draining,
            clock,
        )
        self.certificate = Certificate(settings.tls_certificate, settings.tls_key)
        self.draining = False
        self.has_engines = opener is not None
        self._alone = asyncio.Event()  # unset from the begin of a reload to the old snapshot's end
        self._alone.set()
        self._work: set[asyncio.Task[None]] = set()
        self.snapshot = self._make_snapshot(models)

    def _make_snapshot(self, served: Sequence[ServedModel]) -> Snapshot:
        """Return a snapshot, and change nothing else.

        Raises:
            StartupError: a tokenizer cannot be read, or a setting does not fit the models.
        """
        settings = self._settings
        pipelines = []
        tokenizers: dict[Path, Tokenizer] = {}  # adapters have that of their base
        for model in served:
            limits, path = task_limits(settings, model.bundle.manifest), model.bundle.path
            tokenizer, work = tokenizers.get(path), self._equal_work
            pipelines.append(Pipeline(model, limits, tokenizer, self._clock, work))
            tokenizers[path] = pipelines[-1].context.tokenizer
        defaults, aliases = settings.default_models(), settings.models_of_aliases()
        models = Models(pipelines, self._tasks.values(), defaults, aliases)
        has_keys = self._callers.keys is not None
        context = ProtocolContext(
            self._tasks,
            models,
            self._metrics,
            self,
            BodyLimits.of_requests(
                settings.max_request_bytes,
                settings.max_request_texts,
                settings.max_request_tokens,
            ),
            settings.max_request_texts,
            self._limits,
            has_keys,
            settings.predict_route,
            settings.health_route,
        )
        routes = routes_of(context)
        gate = Gate(
            routes={route.path: route.models for route in routes if route.models is not None},
            limits=self._waits,
            starts=self._starts,
            returns=self._returns,
        )
        access = Access(
            needs_keys=has_keys,
            open_routes=operations.PROBES | OPEN_PAGES | {settings.health_route},
            permissions=(("/metrics", Permission.METRICS), ("/admin/", Permission.ADMIN)),
            hosts=accepted_hosts(settings.host, settings.allowed_hosts),
            by_address=self._quiet_routes,
            clock=self._clock,
        )
        app = create_app(routes, access, gate, self._respond, settings.cors_origins)
        paths = Paths([*PAGES, *(route.path for route in routes)])
        return Snapshot(models, gate, app, routes, paths, _metric_names(served))

    def _add_series(self, snapshot: Snapshot) -> None:
        """Create the metric series of a snapshot's models and routes, which start from zero."""
        names = self._metrics.names = snapshot.metric_names
        self._metrics.add_models(dict.fromkeys(names.values()))
        for route in snapshot.routes:
            references = [*dict.fromkeys(names[model.reference] for model in route.models or ())]
            self._metrics.create_request_series(route.path, references, STATUSES_FROM_ZERO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection with the snapshot that answers now."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        scope["path"] = path = scope["raw_path"].decode("ascii")  # never decoded; see `Paths`
        if root := self._settings.root_path:
            scope[ROOT_PATH] = root
            if path.startswith(root) and path[len(root) : len(root) + 1] in ("", "/"):
                scope["path"] = path[len(root) :] or "/"
        snapshot = self.snapshot
        scope[RECORD] = self._callers.record(scope, snapshot.paths.route(scope["path"]))
        snapshot.running += 1
        try:
            await self._recorder.answer(snapshot.app, scope, receive, send)
        finally:
            snapshot.running -= 1
            if snapshot is not self.snapshot and not snapshot.running:
                self._keep(self._end(snapshot))

    async def _respond(self, request: Request, error: Exception) -> Response:
        """Return the response to an error in the shape of the protocol; see `Gate.refused`."""
        if isinstance(error, errors.Overloaded):
            await self.snapshot.gate.refused(request.scope[RECORD], error)
        return await error_response(request, error, self._settings.request_timeout_ms / 1000)

    def connection_closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self._returns.closed(connection, self._clock.monotonic())

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self.begin()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        # Requests may occupy all threads of the loop's default executor.
        with ThreadPoolExecutor(1) as executor:
            await asyncio.get_running_loop().run_in_executor(executor, self.close)
        await send({"type": "lifespan.shutdown.complete"})

    def begin(self) -> None:
        """Begin to write the metrics; call this once, on the event loop, before any request."""
        bound_threads(available_cpus() + 4)
        self._metrics.unready_reason = self.why_unready
        self._metrics.model_infos = lambda: self.snapshot.model_infos()
        if self.has_engines:
            self._metrics.queues = lambda: self.snapshot.queues()
        self._metrics.reuse = self._equal_work.counts
        if (keys := self._callers.keys) is not None:
            self._metrics.keys_readable = lambda: not keys.file.problem
        self._metrics.certificate_end = lambda: self.certificate.end
        self._metrics.begin()
        self._add_series(self.snapshot)

    def drain(self) -> None:
        """Stop admitting requests; accepted requests are still answered."""
        self.draining = self._starts.is_closed = True

    def close(self) -> None:
        """Fail pending requests, end all threads, and send the last spans."""
        self.draining = True
        close_models(self.snapshot.by_name.values())
        if self._tracing is not None:
            self._tracing.close()

    @property
    def dead_reason(self) -> str | None:
        """Why an engine is dead; None while all engines run."""
        reasons = (q.dead_reason for p in self.snapshot.models.pipelines for q in p.model.queues)
        return next((reason for reason in reasons if reason is not None), None)

    def why_unready(self) -> errors.ServiceError | None:
        """Return why the process admits no request; None if it admits requests."""
        if (reason := self.dead_reason) is not None:
            return errors.EngineDead(f"the engine is dead: {reason}")
        return errors.ShuttingDown("the server is shutting down") if self.draining else None

    def why_restart(self) -> errors.EngineDead | None:
        """Return why the process should be restarted; None if it should not."""
        error = self.why_unready() if self.has_engines else None
        return error if isinstance(error, errors.EngineDead) else None

    def look_at_files(self) -> None:
        """Use the keys and the certificate of now if their files have changed."""
        self.certificate.files.look()
        if self._callers.keys is not None:
            self._callers.keys.file.look()

    def reload_soon(self) -> None:
        """Reload as soon as no other reload is under way; the log has the outcome."""

        async def reload() -> None:
            if not self._alone.is_set():
                log.info("a reload waits until the last one has ended")
                await self._alone.wait()
            # Of several that waited, the first one began after all had been asked for.
            with suppress(errors.ReloadRefused, errors.ShuttingDown):
                await self.reload()

        self._keep(reload())

    async def reload(self) -> Changes:
        """Serve what the store, the keys and the certificate hold now.

        Raises:
            ReloadRefused: that cannot be served, and the snapshot of before stays; or another
                reload has not ended; or the engines are in other processes.
            ShuttingDown: the server drains.
        """
        if not self.has_engines:
            raise errors.ReloadRefused(errors.NEEDS_ROLL)
        if not self._alone.is_set():
            raise errors.ReloadRefused(errors.BUSY)
        self._alone.clear()
        old = self.snapshot
        try:
            self.certificate.load()
            new, refused = await asyncio.to_thread(self._reopened, old)
            if self.draining:
                await asyncio.to_thread(new.close_unused, old)
                raise errors.ShuttingDown("the server is shutting down")
        except BaseException as error:
            self._end_reload()
            if not isinstance(error, errors.StartupError):
                raise
            self._metrics.observe_reload(ok=False)
            log.error("nothing was reloaded: %s", error)
            raise errors.ReloadRefused(f"nothing was reloaded: {error}") from error
        self._add_series(new)
        self.snapshot = new
        self._equal_work.kept.clear()
        if not old.running:
            self._keep(self._end(old))
        reasons = kept_reasons(self._settings)
        changes = Changes.between(old.by_name, new.by_name, reasons, refused)
        self._metrics.observe_reload(ok=True)
        log.info("reloaded: %s", changes)
        return changes

    def _reopened(self, old: Snapshot) -> tuple[Snapshot, dict[str, str]]:
        """Return a snapshot of what the store holds now, with the engines that stay.

        The keys and the certificate of now are in use afterwards. The second value has the adapters
        that are left out, by folder.

        Raises:
            StartupError: a file cannot be read, or a bundle or an engine does not open.
        """
        assert self._opener is not None
        running = [*old.by_name.values()]
        opened = open_bundles(self._settings, [model.bundle for model in running])
        models = self._opener.open(opened.bundles, running)
        try:
            snapshot = self._make_snapshot(models)
            if self._callers.keys is not None:  # last, since the keys are replaced at once
                self._callers.keys.file.read()
            self.certificate.files.read()
        except BaseException:
            close_models(model for model in models if all(model is not other for other in running))
            raise
        return snapshot, opened.refused

    async def _end(self, old: Snapshot) -> None:
        """Close the models that only a snapshot without requests uses."""
        try:
            await asyncio.to_thread(old.close_unused, self.snapshot)
            unserved = old.by_name.keys() - self.snapshot.by_name.keys()
            await asyncio.to_thread(self._metrics.forget_models, unserved)
        finally:
            self._end_reload()

    def _end_reload(self) -> None:
        """Admit the next reload, and return the memory of this one when connections are gone."""
        self._alone.set()
        # By then the last connections are gone that refer to the old snapshot, in cycles.
        asyncio.get_running_loop().call_later(1.0, _return_memory)

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        """Run work in a task that is kept until it ends; the event loop alone would not keep it."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
