"""A process that answers HTTP: its signals, its drain and its exit code."""

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from cloze.model_store import Bundle
from cloze.model_store.system import return_freed_memory
from cloze.service.http.record import accepted_hosts
from cloze.service.machine import raise_file_limit
from cloze.service.models.served_models import EngineFactory
from cloze.service.protocols import operations
from cloze.service.server.acceptor import Acceptor, ConnectionTable, Probes
from cloze.service.server.connection import ServerProtocol
from cloze.service.server.listen import BACKLOG, bind, listen
from cloze.service.server.startup import exit_on_signal, run_loop
from cloze.service.service import Service, single_process
from cloze.service.settings import Settings
from cloze.service.tasks import TASKS, Task

log = logging.getLogger("cloze")

_MOST_FILES = 65_536
"""Limit of open files that a process asks for."""

_LOOK_EVERY_S = 1.0
"""Seconds between looks at the engines, and at the files of keys and certificate."""

_DRAIN_MARGIN_S = 5
"""Time that uvicorn waits for connections after the grace period for accepted requests."""


def serve_in_one_process(
    settings: Settings,
    make_engine: EngineFactory | None = None,
    tasks: Mapping[str, Task] = TASKS,
    bundles: Sequence[Bundle] | None = None,
) -> int:
    """Serve until a signal, with the engines in this process. SIGHUP reloads the models.

    `startup.begin` must come first. See `single_process` for the arguments.

    Returns:
        The exit code: 0 after a drain, 1 if an engine is dead.

    Raises:
        StartupError: a setting, a bundle, a device or the port is wrong.
    """
    listener = bind(settings)
    service = single_process(settings, make_engine, tasks, bundles)
    listen(listener, settings)
    run_loop(answer_http(service, settings, listener))
    if service.dead_reason is None:
        return 0
    logging.shutdown()
    os._exit(1)  # the threads of a dead engine may hang, so none is joined


def answer_http(
    service: Service,
    settings: Settings,
    listener: socket.socket,
    *,
    before_accepting: Callable[[], None] = lambda: None,
) -> Coroutine[Any, Any, None]:
    """Answer requests on a listening socket until a signal, or until a local engine dies.

    Call `before_accepting` when nothing can fail any more.

    Raises:
        StartupError: the certificate or its key cannot be read.
    """
    _make_collections_rare()
    service.certificate.files.read()
    server = _Server(service, settings, before_accepting)

    def on_signal(number: int, frame: FrameType | None) -> None:
        # uvicorn raises the signal again after its shutdown. The handler ignores that second
        # signal, so that the process exits with 0 after a drain.
        if not server.started:
            exit_on_signal(number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return server.serve(sockets=[listener])


def _make_collections_rare() -> None:
    """Exclude the objects of the start from garbage collection, and make collections rarer.

    What the start freed goes back to the operating system. A collection here would find about a
    thousand small objects, and take 80 ms.
    """
    return_freed_memory()
    gc.freeze()
    gc.enable()
    # With Python's thresholds and 4,000 busy connections, full collections, which look at all
    # connections, take 150 ms each second.
    gc.set_threshold(100_000, 20, 100)


def _connection_limit(most: int) -> int:
    """Return the most open connections of this process, and raise its limit of open files.

    `most` is the setting.
    """
    files = raise_file_limit(_MOST_FILES)
    # Models, logs, and sockets between processes are files too.
    allowed = max(1, files - max(48, files // 16))
    if most > allowed:
        log.warning("max_connections is %d, but the open files allow %d", most, allowed)
    return min(most or allowed, allowed)


class _Server(uvicorn.Server):
    """A uvicorn server that starts a bounded drain at the first signal; see `answer_http`."""

    def __init__(
        self, service: Service, settings: Settings, before_accepting: Callable[[], None]
    ) -> None:
        self._service = service
        self._before_accepting = before_accepting
        self._drain_s = settings.drain_s
        self._grace_s = settings.shutdown_grace_ms / 1000
        self._drain_timer: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None
        self._table = ConnectionTable(settings, _connection_limit(settings.max_connections))
        self._probes = Probes(
            operations.probe_bodies(service),
            accepted_hosts(settings.host, settings.allowed_hosts),
        )
        super().__init__(
            uvicorn.Config(
                service,
                http="httptools",
                ws="none",
                proxy_headers=bool(settings.trusted_proxies),
                forwarded_allow_ips=[*settings.trusted_proxies],
                log_config=None,
                backlog=BACKLOG,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(self._grace_s) + _DRAIN_MARGIN_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        service, certificate = self._service, self._service.certificate

        make_protocol = partial(
            ServerProtocol,
            table=self._table,
            closed=service.connection_closed,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        [listener] = sockets or []
        acceptor = Acceptor(listener, make_protocol, lambda: certificate.context, self._probes)
        if service.has_engines and hasattr(signal, "SIGHUP"):  # Windows has no such signal
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, service.reload_soon)
        self._watching = asyncio.create_task(self._watch())
        self._before_accepting()
        acceptor.begin()
        self.servers = [acceptor]  # type: ignore[list-item]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain; if SIGTERM asks for it, fail readiness and serve on for `Settings.drain_s` first.

        Whoever sends SIGTERM twice, as a service manager to all processes of a group, changes
        nothing. SIGINT ends the wait.
        """
        if sig == signal.SIGTERM and self._drain_s:
            if self._drain_timer is None:
                log.info("readiness fails; requests are served for another %g s", self._drain_s)
                self._service.draining = True
                loop = asyncio.get_running_loop()
                self._drain_timer = loop.call_later(self._drain_s, self._drain, sig, None)
            return
        if self._drain_timer is not None:
            self._drain_timer.cancel()
        self._drain(sig, frame)

    def _drain(self, sig: int, frame: FrameType | None) -> None:
        """Stop admitting requests, and fail accepted requests after the grace period."""
        super().handle_exit(sig, frame)
        log.info("draining: finishing accepted requests, for at most %.0f s", self._grace_s)
        self._service.drain()
        closer = threading.Thread(target=self._service.close, daemon=True)
        asyncio.get_running_loop().call_later(self._grace_s, closer.start)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the connections, those too that are still being accepted, and the application."""
        self._table.is_draining = True
        await super().shutdown(sockets)

    async def _watch(self) -> None:
        """End the server when a local engine is dead, and look at the files of an operator."""
        service = self._service
        while not self.should_exit:
            await asyncio.sleep(_LOOK_EVERY_S)
            if service.has_engines and service.dead_reason is not None:
                # A client that sends its request more slowly gets no answer.
                self.config.timeout_graceful_shutdown = 2  # seconds
                self.should_exit = True
            service.look_at_files()
            if self._table.closed_count >= 256 and not self.server_state.tasks:
                self._table.closed_count = 0
                gc.collect()  # the reference cycles of closed connections
