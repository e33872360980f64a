"""Composes everything, and owns the process: start-up, signals, the drain, the exit code."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from types import FrameType
from typing import NoReturn

import uvicorn
from fastapi import FastAPI

from model_store import Bundle, Store, StoreError
from service.api import STATUS, Health, create_api
from service.core import AskedPrecision, BatchReport, Device, Engine, StartupError
from service.cost import measure_cost
from service.engine import OnnxEngine
from service.http import BoundedHeaders
from service.metrics import Metrics
from service.pipeline import Models, Pipeline
from service.scheduler import Scheduler
from service.settings import CPU_BATCH_TOKENS, Settings, unknown_variables
from service.task_api import TASK_ROUTES, ApiLimits
from service.tasks import TaskLimits
from service.tokenizer import Tokenizer

log = logging.getLogger("cloze")

_DEAD_GRACE_S = 2

_JOIN_TIMEOUT_S = 5.0
"""For all threads of all models to end; a hung run is then left behind."""

_BACKLOG = 2048
"""Connections that may wait to be accepted."""

EngineFactory = Callable[[Bundle, Device, AskedPrecision], Engine]
"""Opens a bundle's engine."""

_DRAIN_MARGIN_S = 5
"""How much longer uvicorn waits for connections than the scheduler for answers: for these to be written."""


class Service:
    """The served models and the state of the process, independent of how it is reached.

    Args:
        settings: see `Settings`.
        make_engine: opens a bundle's engine; tests give one that fails when told to.

    Raises:
        StartupError: the store is empty, a bundle does not open, or a device is missing.
    """

    def __init__(self, settings: Settings, make_engine: EngineFactory | None = None) -> None:
        self.on_dead: Callable[[], None] = lambda: None
        """Told, on any thread, that an engine died."""
        self._settings = settings
        self._draining = False
        bundles = open_bundles(settings)
        make_engine = make_engine or partial(OnnxEngine, gpu_memory_limit=settings.gpu_memory_limit_mb * 2**20)
        engines = [make_engine(bundle, settings.device, settings.precision) for bundle in bundles]
        references = [bundle.manifest.reference for bundle in bundles]
        tasks = {path: [b.manifest.reference for b in bundles if task in b.manifest.tasks] for path, task in TASK_ROUTES.items()}
        statuses = sorted({200, *(status for status, _ in STATUS.values())})
        self._metrics = Metrics(list(tasks.items()), references, statuses)
        self.models = Models(
            [self._pipeline(bundle, engine) for bundle, engine in zip(bundles, engines, strict=True)],
        )
        self._metrics.watch(
            queues={p.manifest.reference: _queue_of(p.scheduler) for p in self.models.pipelines},
            ready=lambda: not self._draining and self.dead() is None,
        )
        for bundle, engine in zip(bundles, engines, strict=True):
            tasks_of_it = ", ".join(bundle.manifest.tasks)
            precision = f"{engine.precision}, {engine.reason}"
            log.info("serving %s for %s on %s in %s", bundle.manifest.reference, tasks_of_it, engine.device, precision)

    def api(self) -> FastAPI:
        """The HTTP application; when it shuts down, so does this service."""
        settings = self._settings
        limits = ApiLimits(settings.max_request_bytes, settings.max_request_texts, settings.request_timeout_ms / 1000)
        app = create_api(self.models, self._metrics, Health(self.dead, lambda: self._draining), limits)

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield
            with ThreadPoolExecutor(1) as own:  # the shared threads may be busy with requests
                await asyncio.get_running_loop().run_in_executor(own, self.close)

        app.router.lifespan_context = lifespan
        return app

    def dead(self) -> str | None:
        """Why an engine is dead; None while all live."""
        return next((reason for p in self.models.pipelines if (reason := p.scheduler.dead) is not None), None)

    def drain(self) -> None:
        """Admit nothing more; accepted requests run on."""
        self._draining = True
        for pipeline in self.models.pipelines:
            pipeline.scheduler.drain()

    def close(self) -> None:
        """Fail what is still pending and end all threads."""
        self._draining = True
        end = time.monotonic() + _JOIN_TIMEOUT_S
        for pipeline in self.models.pipelines:
            pipeline.scheduler.close(max(0.0, end - time.monotonic()))

    def _pipeline(self, bundle: Bundle, engine: Engine) -> Pipeline:
        settings, reference = self._settings, bundle.manifest.reference

        def on_batch(report: BatchReport) -> None:
            self._metrics.observe_batch(reference, report)

        def on_dead(reason: str) -> None:
            log.error("the engine of %s is dead: %s", reference, reason)
            self.on_dead()

        scheduler = Scheduler(
            engine,
            workers=settings.worker_count(engine.device),
            max_batch_tokens=settings.max_batch_tokens or _fitted_tokens(bundle, engine, settings),
            max_queue_tokens=settings.max_queue_tokens,
            stall_timeout_s=settings.stall_timeout_ms / 1000,
            on_batch=on_batch,
            on_dead=on_dead,
        )
        return Pipeline(
            bundle.manifest,
            Tokenizer(bundle),
            scheduler,
            precision=engine.precision,
            limits=TaskLimits(
                max_tokens=bundle.manifest.limits.max_tokens,
                max_masks=settings.max_masks,
                max_top_k=settings.max_top_k,
                max_results=settings.max_request_results,
                max_request_tokens=settings.max_request_tokens,
                max_text_characters=settings.max_text_characters,
            ),
            request_timeout_s=settings.request_timeout_ms / 1000,
        )


def open_bundles(settings: Settings) -> list[Bundle]:
    """Open the bundles that the settings name, or the newest of each name.

    Raises:
        StartupError: there are none, or one does not open.
    """
    store = Store(settings.model_store)
    try:
        names = settings.model or tuple(dict.fromkeys(reference.split("@")[0] for reference in store.references()))
        if not names:
            raise StartupError(
                f"the model store {settings.model_store} has no bundle; make one with `cloze export SOURCE --name NAME`"
            )
        return [store.open(name) for name in names]
    except StoreError as error:
        raise StartupError(str(error)) from error


def serve(settings: Settings, make_engine: EngineFactory | None = None) -> int:
    """Serve until SIGTERM or SIGINT, or until an engine dies.

    Returns:
        The process's exit code: 0 after a drain, 1 when an engine died.

    Raises:
        StartupError: see `Service`, or the port is taken.
    """
    # Until the server takes over: process 1 of a container ignores signals that it has no handler for.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for name in unknown_variables():
        log.warning("the variable %s is not a setting; see `cloze serve --help`", name)
    listener = _listen(settings)
    service = Service(settings, make_engine)
    server = _Server(service, settings)
    service.on_dead = server.stop

    def on_signal(number: int, frame: FrameType | None) -> None:
        # uvicorn raises the signal it caught once more after its shutdown: a drained exit is a success.
        if not server.started:
            _leave(number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise StartupError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    server.run(sockets=[listener])
    if service.dead() is not None:
        # A hung run cannot be joined; nothing else is left to do.
        logging.shutdown()
        os._exit(1)
    return 0


class _Server(uvicorn.Server):
    """uvicorn, whose first signal begins the drain and bounds it."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service = service
        self._grace_s = settings.shutdown_grace_ms / 1000
        super().__init__(
            uvicorn.Config(
                service.api(),
                http=BoundedHeaders,
                log_config=None,
                backlog=_BACKLOG,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,  # longer than the usual 60 s of load balancers, so that they close first
                timeout_graceful_shutdown=int(self._grace_s) + _DRAIN_MARGIN_S,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On a signal: admit nothing more, and bound the time that accepted requests have left."""
        super().handle_exit(sig, frame)
        log.info("draining: finishing what was accepted, for at most %.0f s", self._grace_s)
        self._service.drain()
        closer = threading.Thread(target=self._service.close, daemon=True)
        asyncio.get_running_loop().call_later(self._grace_s, closer.start)

    def stop(self) -> None:
        """End as soon as the failed requests are answered; whoever has not sent a whole one by then is not waited for."""
        self.config.timeout_graceful_shutdown = _DEAD_GRACE_S
        self.should_exit = True


def _leave(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _fitted_tokens(bundle: Bundle, engine: Engine, settings: Settings) -> int:
    """How many tokens a batch should hold, where the settings leave that open."""
    if not engine.mixes_lengths:
        return CPU_BATCH_TOKENS
    cost = measure_cost(engine, bundle.manifest.limits.max_tokens)
    tokens = cost.batch_tokens(settings.batch_latency_ms / 1000)
    log.info(
        "batches of %s hold %d tokens: one takes %.2f ms + %.3f us a token + %.5f us a token and token of its length",
        bundle.manifest.reference,
        tokens,
        cost.fixed * 1e3,
        cost.per_token * 1e6,
        cost.per_square * 1e6,
    )
    return tokens


def _queue_of(scheduler: Scheduler) -> Callable[[], float]:
    return lambda: scheduler.queued_tokens


def _listen(settings: Settings) -> socket.socket:
    """Take the port first: a taken one is told before a model is loaded. Nobody can connect until the server runs."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error
    return listener
