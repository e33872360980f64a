"""Replaces the service of a process while it answers requests.

A request ends with the service that it began with, so no answer mixes old and new. What the new
service does not use is closed after the last such request. Until then no further service opens: at
most two are in memory.
"""

import asyncio
import ctypes
import gc
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from cloze.service.app import Service
from cloze.service.core import Changes, ReloadRefused, ShuttingDown, StartupError

log = logging.getLogger("cloze")

_COLLECT_AFTER_S = 1.0
"""Time until the last connections of an old service are gone, which refer to it in cycles.

A full collection is short, since `server` has frozen most other objects.
"""


BUSY: Final = "another reload is under way, or its old models still answer requests; ask again"
"""Why a reload that is asked for by a request is refused at once; a signal waits."""


class Generations:
    """ASGI application: the service that answers new requests, and one that still ends old ones.

    Args:
        service: the first service.
        check_certificate: raises `StartupError` unless the certificate's files can be used.
        use_certificate: uses the certificate of the files for new connections.

    Attributes:
        service: the service that answers new requests.
    """

    def __init__(
        self,
        service: Service,
        check_certificate: Callable[[], None],
        use_certificate: Callable[[], None],
    ) -> None:
        self.service = service
        self._check_certificate, self._use_certificate = check_certificate, use_certificate
        self._app: ASGIApp = service.api()
        self._running: dict[Service, int] = {service: 0}  # requests per service
        self._alone = asyncio.Event()  # unset from the begin of a reload to the old service's end
        self._alone.set()
        self._tasks: set[asyncio.Task[None]] = set()
        if service.reopens:
            service.on_reload(self.reload)

    def refusal(self, scope: Scope) -> bytes | None:
        """Return the response that refuses a request; see `Gate.refusal`."""
        return self.service.gate.refusal(scope)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection with the service that answers now."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        service = self.service
        self._running[service] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[service] -= 1
            if service is not self.service and not self._running[service]:
                self._end(service)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Close the last service when the server shuts down."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        # Requests may occupy all threads of the loop's default executor.
        with ThreadPoolExecutor(1) as executor:
            await asyncio.get_running_loop().run_in_executor(executor, self.service.close)
        await send({"type": "lifespan.shutdown.complete"})

    def reload_soon(self) -> None:
        """Reload as soon as no other reload is under way; the log says what comes of it."""

        async def reload() -> None:
            if not self._alone.is_set():
                log.info("a reload waits until the last one has ended")
                await self._alone.wait()
            # Of several that waited, the first one began after all had been asked for.
            with suppress(ReloadRefused, ShuttingDown):
                await self.reload()

        self._start(reload())

    async def reload(self) -> Changes:
        """Serve what the store, the keys and the certificate hold now.

        Raises:
            ReloadRefused: that cannot be served, and what was served before is served on; or
                another reload has not ended.
            ShuttingDown: the server drains.
        """
        if not self._alone.is_set():
            raise ReloadRefused(BUSY)
        self._alone.clear()
        old = self.service
        try:
            app, new = await self._open(old)
        except BaseException as error:
            self._alone.set()
            self._return_memory_later()
            if not isinstance(error, StartupError):
                raise
            log.error("nothing was reloaded: %s", error)
            raise ReloadRefused(f"nothing was reloaded: {error}") from error
        self.service, self._app = new, app
        self._running[new] = 0
        if not self._running[old]:
            self._end(old)
        changes = old.changes(new)
        log.info("reloaded: %s", changes)
        return changes

    async def _open(self, old: Service) -> tuple[ASGIApp, Service]:
        """Return the next service and its application, or change nothing.

        Raises:
            StartupError: the certificate, the keys or a bundle cannot be used.
            ShuttingDown: the server drains.
        """
        self._check_certificate()
        new = await asyncio.to_thread(old.reopened)
        try:
            if old.draining:
                raise ShuttingDown("the server is shutting down")
            self._use_certificate()
            return new.api(), new
        except BaseException:
            await asyncio.to_thread(new.close_unused, old)
            raise

    def _end(self, service: Service) -> None:
        """Close what only a service without requests uses."""

        async def close() -> None:
            try:
                await asyncio.to_thread(service.close_unused, self.service)
            finally:
                del self._running[service]
                self._alone.set()
                self._return_memory_later()

        self._start(close())

    def _return_memory_later(self) -> None:
        asyncio.get_running_loop().call_later(_COLLECT_AFTER_S, _return_memory)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _return_memory() -> None:
    """Give the memory of an old service back to the operating system."""
    gc.collect()
    # The threads that opened its engine keep what they have freed.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
