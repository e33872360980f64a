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

from service.api import STATUS, Health, create_api
from service.core import Queue, StartupError
from service.http import BoundedHeaders
from service.lanes import EngineFactory, Lane, MakeLanes, Told, local_lanes, open_bundles
from service.metrics import Metrics
from service.pipeline import Models, Pipeline
from service.settings import Settings, unknown_variables
from service.task_api import TASK_ROUTES, ApiLimits
from service.tasks import TaskLimits
from service.tokenizer import Tokenizer

log = logging.getLogger("cloze")

_DEAD_GRACE_S = 2

_JOIN_TIMEOUT_S = 5.0
"""For all threads of all models to end; a hung run is then left behind."""

_BACKLOG = 2048
"""Connections that may wait to be accepted."""

_DRAIN_MARGIN_S = 5
"""How much longer uvicorn waits for connections than the scheduler for answers: for these to be written."""


class Service:
    """The served models and the state of the process, independent of how it is reached.

    Args:
        settings: see `Settings`.
        make_engine: opens a bundle's engine; tests give one that fails when told to.
        make_lanes: instead of engines in this process.

    Raises:
        StartupError: the store is empty, a bundle does not open, or a device is missing.
    """

    def __init__(self, settings: Settings, make_engine: EngineFactory | None = None, make_lanes: MakeLanes | None = None) -> None:
        self.on_dead: Callable[[], None] = lambda: None
        """Told, on any thread, that an engine died."""
        self._settings = settings
        self._draining = False
        self._elsewhere = make_lanes is not None
        bundles = open_bundles(settings)
        references = [bundle.manifest.reference for bundle in bundles]
        tasks = {path: [b.manifest.reference for b in bundles if task in b.manifest.tasks] for path, task in TASK_ROUTES.items()}
        statuses = sorted({200, *(status for status, _ in STATUS.values())})
        self._metrics = Metrics(list(tasks.items()), references, statuses, shared=self._elsewhere)
        told = Told(self._metrics.observe_batch, lambda _: self.on_dead())
        lanes = (make_lanes or partial(local_lanes, settings, make_engine))(bundles, told)
        self.models = Models([self._pipeline(lane) for lane in lanes])
        queues = {} if self._elsewhere else {lane.bundle.manifest.reference: _tokens_of(lane.queue) for lane in lanes}
        self._metrics.watch(queues=queues, ready=lambda: not self._draining and self.dead() is None)

    def api(self) -> FastAPI:
        """The HTTP application; when it shuts down, so does this service."""
        settings = self._settings
        limits = ApiLimits(settings.max_request_bytes, settings.max_request_texts, settings.request_timeout_ms / 1000)
        app = create_api(self.models, self._metrics, Health(self.dead, lambda: self._draining, restarts=self._elsewhere), limits)

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

    def _pipeline(self, lane: Lane) -> Pipeline:
        settings, manifest = self._settings, lane.bundle.manifest
        return Pipeline(
            manifest,
            Tokenizer(lane.bundle),
            lane.queue,
            precision=lane.precision,
            limits=TaskLimits(
                max_tokens=manifest.limits.max_tokens,
                max_masks=settings.max_masks,
                max_top_k=settings.max_top_k,
                max_results=settings.max_request_results,
                max_request_tokens=settings.max_request_tokens,
                max_text_characters=settings.max_text_characters,
            ),
            request_timeout_s=settings.request_timeout_ms / 1000,
        )


def serve(settings: Settings, make_engine: EngineFactory | None = None) -> int:
    """Serve until SIGTERM or SIGINT, or until an engine dies.

    Returns:
        The process's exit code: 0 after a drain, 1 when an engine died.

    Raises:
        StartupError: see `Service`, or the port is taken.
    """
    begin(settings)
    warn_of_unknown_variables()
    listener = bind(settings)
    service = Service(settings, make_engine)
    listen(listener, settings)
    run(service, settings, listener)
    if service.dead() is not None:
        # A hung run cannot be joined; nothing else is left to do.
        logging.shutdown()
        os._exit(1)
    return 0


def begin(settings: Settings) -> None:
    """What every process of the service does first: signals and logging."""
    # Until the server takes over: process 1 of a container ignores signals that it has no handler for.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)


def warn_of_unknown_variables() -> None:
    """A word about those that are most likely misspelt."""
    for name in unknown_variables():
        log.warning("the variable %s is not a setting; see `cloze serve --help`", name)


def run(service: Service, settings: Settings, listener: socket.socket) -> None:
    """Answer on a listening socket until a signal, or until an engine in this process dies."""
    server = _Server(service, settings)
    service.on_dead = server.stop

    def on_signal(number: int, frame: FrameType | None) -> None:
        # uvicorn raises the signal it caught once more after its shutdown: a drained exit is a success.
        if not server.started:
            _leave(number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    server.run(sockets=[listener])


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


def _tokens_of(queue: Queue) -> Callable[[], float]:
    return lambda: queue.queued_tokens


def bind(settings: Settings) -> socket.socket:
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


def listen(listener: socket.socket, settings: Settings) -> None:
    """Let clients in, and say where.

    Raises:
        StartupError: somebody else listens there.
    """
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise StartupError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
