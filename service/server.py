"""One process that answers HTTP: signals, the listening socket, the drain, the exit code."""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import NoReturn

import uvicorn

from service.app import Service
from service.core import StartupError
from service.http.connection import BoundedHeaders
from service.settings import Settings, unknown_variables

log = logging.getLogger("cloze")

_DEAD_GRACE_S = 2

_BACKLOG = 2048
"""Connections that may wait to be accepted."""

_DRAIN_MARGIN_S = 5
"""How much longer uvicorn waits for connections than the scheduler waits for answers."""


def begin(settings: Settings) -> None:
    """Set up signals and logging; every process of a server does this first."""
    # Process 1 of a container ignores signals that have no handler.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(message)s",
        stream=sys.stderr,
    )


def warn_of_unknown_variables() -> None:
    """Warn about environment variables that are most likely misspelt."""
    for name in unknown_variables():
        log.warning("the variable %s is not a setting; see `cloze serve --help`", name)


def run(service: Service, settings: Settings, listener: socket.socket) -> None:
    """Answer on a listening socket until a signal, or until an engine in this process dies."""
    server = _Server(service, settings)

    def on_signal(number: int, frame: FrameType | None) -> None:
        # uvicorn raises its signal again after the shutdown: a drained exit is a success.
        if not server.started:
            _leave(number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    server.run(sockets=[listener])


def exit_if_dead(service: Service) -> None:
    """End the process with code 1 if an engine is dead: a hung run cannot be joined."""
    if service.dead is not None:
        logging.shutdown()
        os._exit(1)


class _Server(uvicorn.Server):
    """uvicorn, whose first signal begins a bounded drain."""

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
                # Longer than the usual 60 s of load balancers, so that they close first.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(self._grace_s) + _DRAIN_MARGIN_S,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop admitting requests, and bound the time that accepted requests have left."""
        super().handle_exit(sig, frame)
        log.info("draining: finishing accepted requests, for at most %.0f s", self._grace_s)
        self._service.drain()
        closer = threading.Thread(target=self._service.close, daemon=True)
        asyncio.get_running_loop().call_later(self._grace_s, closer.start)

    async def on_tick(self, counter: int) -> bool:
        """End once an engine is dead, as soon as the failed requests are answered."""
        if self._service.dead is not None and not self._service.restarts_engines:
            # A client that has not sent its whole request by then gets no answer.
            self.config.timeout_graceful_shutdown = _DEAD_GRACE_S
            return True
        return await super().on_tick(counter)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def bind(settings: Settings) -> socket.socket:
    """Bind the port before models are loaded, so that a taken port fails at once.

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
    """Accept connections from now on, and log the address.

    Raises:
        StartupError: another program listens on the address.
    """
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _cannot_listen(settings, error) from error
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)


def _cannot_listen(settings: Settings, error: OSError) -> StartupError:
    return StartupError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}")
