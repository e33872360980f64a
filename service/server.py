"""A process that answers HTTP: its signals, listening socket, drain and exit code."""

import asyncio
import atexit
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import NoReturn

import uvicorn

from cloze.service.app import Service
from cloze.service.core import StartupError
from cloze.service.generations import Generations
from cloze.service.http.acceptor import Acceptor
from cloze.service.http.access import OF_ADMIN_SOCKET, accepted_hosts, is_loopback
from cloze.service.http.probes import Probes
from cloze.service.http.server_protocol import ConnectionLimits, ConnectionTable, ServerProtocol
from cloze.service.logs import announce, start_logging
from cloze.service.protocols import operations
from cloze.service.settings import Settings, unknown_variables

log = logging.getLogger("cloze")

_DEAD_GRACE_S = 2
"""How long uvicorn waits for connections after an engine has died."""

_BACKLOG = 2048
"""Length of the operating system's queue of connections that are not yet accepted."""

_MOST_FILES = 65_536
"""Limit of open files that a process asks for."""

_OTHER_FILES = 48
"""Files that are no connections: models, logs, and sockets between processes."""

_GC_THRESHOLDS = (100_000, 20, 100)
"""Objects until a collection of each generation; the last one looks at all connections.

With Python's values and 4,000 busy connections, full collections take 150 ms each second.
"""

_COLLECT_AFTER_CLOSED = 256
"""Number of closed connections after which an idle server collects their reference cycles."""

_DRAIN_MARGIN_S = 5
"""Time that uvicorn waits for connections after the grace period for accepted requests."""


def begin(settings: Settings) -> None:
    """Set up signals and logging. Every process of a server calls this function first."""
    # Linux does not deliver a signal without a handler to process 1 of a container.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_on_signal)
    # It asks for a reload, and the processes that cannot reload must not end by it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    start_logging(settings.log_level, settings.log_format)


def warn_of_unknown_variables() -> None:
    """Log a warning for each ``CLOZE_`` environment variable that is not a setting."""
    for name in unknown_variables():
        log.warning("the variable %s is not a setting; see `cloze serve --help`", name)


def run(service: Service, settings: Settings, listeners: list[socket.socket]) -> Service:
    """Answer requests on listening sockets until a signal, or until a local engine dies.

    SIGHUP replaces the service by one of what the store holds by then.

    Returns:
        The service that answered last.
    """
    _freeze_objects()
    server = _make_server(service, settings)
    server.run(sockets=listeners)
    return server.service


async def serve(
    service: Service,
    settings: Settings,
    listeners: list[socket.socket],
    *,
    retire_on: signal.Signals,
    before_accepting: Callable[[], None],
) -> None:
    """Do what `run` does, on the running event loop and without SIGHUP.

    Args:
        service: answers the requests.
        settings: the operator's settings.
        listeners: the listening sockets.
        retire_on: the signal after which no connection is accepted, and this function returns
            after the last open one. Each connection ends with its next answer.
        before_accepting: called when nothing can fail any more.

    Raises:
        StartupError: the certificate or its key cannot be read.
    """
    _freeze_objects()
    server = _make_server(service, settings)
    asyncio.get_running_loop().add_signal_handler(retire_on, server.retire)
    before_accepting()
    await server.serve(sockets=listeners)


def _freeze_objects() -> None:
    """Exclude the objects of the start from garbage collection, and make collections rarer.

    A full collection otherwise takes 150 ms under load, and a request waits for it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def _make_server(service: Service, settings: Settings) -> "_Server":
    server = _Server(service, settings)
    server.load()

    def on_signal(number: int, frame: FrameType | None) -> None:
        # uvicorn raises the signal again after its shutdown. The handler ignores that second
        # signal, so that the process exits with 0 after a drain.
        if not server.started:
            _exit_on_signal(number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return server


def exit_if_dead(service: Service) -> None:
    """Exit with code 1 if an engine is dead, without joining its threads, which may hang."""
    if service.dead is not None:
        logging.shutdown()
        os._exit(1)


class _Server(uvicorn.Server):
    """A uvicorn server that starts a bounded drain at the first signal."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._generations = Generations(service, self._check_certificate, self._use_certificate)
        self._grace_s = settings.shutdown_grace_ms / 1000
        limits = ConnectionLimits(
            settings.header_timeout_ms / 1000,
            settings.idle_timeout_ms / 1000,
            _connection_limit(settings.max_connections),
            settings.max_connections_per_address,
        )
        self._table = ConnectionTable(limits)
        self._probes = Probes(
            operations.probe_bodies(lambda: self.service),
            accepted_hosts(settings.host, settings.allowed_hosts),
        )
        self._acceptors: list[Acceptor] = []
        self._retiring = False
        super().__init__(
            uvicorn.Config(
                self._generations,
                http="httptools",
                ws="none",
                proxy_headers=False,  # `Callers` believes only trusted proxies
                log_config=None,
                backlog=_BACKLOG,
                log_level="warning",
                ssl_certfile=settings.tls_certificate,
                ssl_keyfile=settings.tls_key,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(self._grace_s) + _DRAIN_MARGIN_S,
            )
        )

    @property
    def service(self) -> Service:
        """The service that answers new requests."""
        return self._generations.service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets=[])
        config = self.config

        def make_protocol(*, is_admin: bool) -> asyncio.Protocol:
            return ServerProtocol(
                refusal=self._generations.refusal,
                table=self._table,
                answers=self.service.answers,
                starts=self.service.starts,
                config=config,
                server_state=self.server_state,
                app_state=self.lifespan.state | {OF_ADMIN_SOCKET: is_admin},
            )

        for listener in sockets or []:
            is_admin = listener.family == socket.AF_UNIX
            make = partial(make_protocol, is_admin=is_admin)
            tls = None if is_admin else config.ssl
            self._acceptors.append(Acceptor(listener, make, tls, self._probes))
        self.servers = self._acceptors  # type: ignore[assignment]
        if self.service.reopens:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, self._generations.reload_soon)

    def retire(self) -> None:
        """Accept no connection, end each with its next answer, and return after the last one."""
        self._retiring = True
        for acceptor in self._acceptors:
            acceptor.close()
        self.config.encoded_headers.append((b"connection", b"close"))  # uvicorn closes by it
        count = len(self.server_state.connections)
        log.info("other processes accept connections; this one finishes its %d", count)

    def load(self) -> None:
        """Read the certificate.

        Raises:
            StartupError: the certificate or its key cannot be read.
        """
        with self._certificate_errors():
            self.config.load()

    def _check_certificate(self) -> None:
        """Raise `StartupError` unless the certificate's files can be used."""
        if self.config.ssl_certfile is not None:
            with self._certificate_errors():
                self._use_certificate_in(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def _use_certificate(self) -> None:
        """Read the certificate again, for the connections that open from now on."""
        if self.config.ssl is not None:
            self._use_certificate_in(self.config.ssl)

    def _use_certificate_in(self, context: ssl.SSLContext) -> None:
        assert self.config.ssl_certfile is not None
        context.load_cert_chain(self.config.ssl_certfile, self.config.ssl_keyfile)

    @contextmanager
    def _certificate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # an SSLError too
            path = self.config.ssl_certfile
            raise StartupError(
                f"the certificate {path} or its key cannot be used: {error.strerror or error}"
            ) from None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop admitting requests, and fail accepted requests after the grace period."""
        super().handle_exit(sig, frame)
        log.info("draining: finishing accepted requests, for at most %.0f s", self._grace_s)
        service = self.service
        service.drain()
        closer = threading.Thread(target=service.close, daemon=True)
        asyncio.get_running_loop().call_later(self._grace_s, closer.start)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the connections, those too that are still being accepted, and the application."""
        self._table.is_draining = True
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to shut down: a local engine is dead, or uvicorn stops the server."""
        if self.service.dead is not None and not self.service.restarts_engines:
            # A client that sends its request more slowly gets no answer.
            self.config.timeout_graceful_shutdown = _DEAD_GRACE_S
            return True
        if self._retiring and not self.server_state.connections:
            return all(not acceptor.is_opening for acceptor in self._acceptors)
        if self._table.closed_count >= _COLLECT_AFTER_CLOSED and not self.server_state.tasks:
            self._table.closed_count = 0
            gc.collect()
        return await super().on_tick(counter)


def _connection_limit(most: int) -> int:
    """Return the most open connections of this process, and raise its limit of open files.

    Args:
        most: the setting; 0: what the limit of open files allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    allowed = max(1, soft - max(_OTHER_FILES, soft // 16))
    if most > allowed:
        log.warning("max_connections is %d, but the open files allow %d", most, allowed)
    return min(most or allowed, allowed)


def _exit_on_signal(number: int, _: FrameType | None) -> NoReturn:
    """End the process during the start, and delete its temporary folders.

    SystemExit would not do: Python ignores exceptions of weak references' callbacks, and turns
    those of `__set_name__` into a RuntimeError.
    """
    atexit._run_exitfuncs()
    os._exit(128 + number)


def bind(settings: Settings) -> socket.socket:
    """Bind the address and return the socket; call `listen` to accept connections.

    Binding before models are loaded makes a start on a used port fail at once.

    Raises:
        StartupError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(settings, error) from error
    return listener


def listen(listener: socket.socket, settings: Settings) -> None:
    """Start to accept connections, and log the address.

    Raises:
        StartupError: another program listens on the address, or the log cannot be written.
    """
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _cannot_listen(settings, error) from error
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.tls_certificate else "http"
    address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    announce(f"listening on {address}")
    if not (is_loopback(settings.host) or settings.keys_file or settings.allow_anonymous):
        log.warning(
            "others reach this address, and no key is needed: set CLOZE_KEYS_FILE, or "
            "CLOZE_ALLOW_ANONYMOUS=1 if that is intended"
        )
    log.info("a page to try it: %s/, documentation: %s/docs", address, address)
    log.info("metrics: %s/metrics", address)


def _cannot_listen(settings: Settings, error: OSError) -> StartupError:
    return StartupError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}")
