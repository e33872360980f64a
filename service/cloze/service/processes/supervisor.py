"""Starts engine processes and front ends, restarts those that die, and ends them in order.

The supervisor binds every socket: the HTTP port, and a Unix socket per engine process. A socket
outlives the processes that accept on it. Speaks no HTTP.
"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cloze.service.core import Device
from cloze.service.errors import NEEDS_ROLL, StartupError
from cloze.service.models.served_models import open_bundles
from cloze.service.observe.processes import count_restarts
from cloze.service.processes.children import (
    ENGINE_COMMAND,
    FRONTEND_COMMAND,
    Child,
    end_all,
    listen_for_front_ends,
)
from cloze.service.server.listen import bind, listen
from cloze.service.server.startup import begin, warn_of_unknown_variables
from cloze.service.settings import Settings

log = logging.getLogger("cloze")

_END_GRACE_S = 10.0


class Supervisor:
    """The processes of one server.

    Args:
        settings: with at least one front end.
        listener: the bound HTTP socket.
        folder: private to the server; holds the engines' sockets and the metrics.
        engine_command: starts an engine process.

    Raises:
        StartupError: the store is empty, a bundle does not open, or a path is too long.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        folder: Path,
        engine_command: tuple[str, ...] = ENGINE_COMMAND,
    ) -> None:
        bundles = open_bundles(settings).bundles
        # By version: a restarted process must not serve what was published in the meantime.
        references = tuple(bundle.manifest.reference for bundle in bundles)
        self._settings = settings.model_copy(update={"model": references})
        self._listener, self._folder = listener, folder
        self._restarts = count_restarts(folder, ("engine", "frontend"))
        self._sockets = tuple(folder / f"engine-{n}.sock" for n in range(settings.gpus))
        self._engines = [
            Child(f"engine-{n}", engine_command, listen_for_front_ends(path), n)
            for n, path in enumerate(self._sockets)
        ]
        self._front_ends = [
            Child(f"frontend-{n}", FRONTEND_COMMAND, listener) for n in range(settings.frontends)
        ]
        self._tasks: list[asyncio.Task[int]] = []

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT.

        Returns:
            The exit code: 0 after a drain, or the code of a child that did not start.

        Raises:
            StartupError: another program listens on the port.
        """
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        loop.add_signal_handler(signal.SIGHUP, log.error, "%s", NEEDS_ROLL)
        stop = asyncio.create_task(stopping.wait())
        try:
            if (code := await self._start_all(self._engines, stop)) is not None:
                return code
            if stopping.is_set():
                return 128 + signal.SIGTERM
            listen(self._listener, self._settings)
            if (code := await self._start_all(self._front_ends, stop)) is not None:
                return code
            if not stopping.is_set():
                log.info("%d front ends are ready", len(self._front_ends))
            return await self._wait(stop) or 0
        finally:
            for task in self._tasks:
                task.cancel()  # what ends now is not started again
            # Clients would go on to queue for a server that ends.
            self._listener.close()
            drain_s = self._settings.drain_s + self._settings.shutdown_grace_ms / 1000
            end_all(self._front_ends, drain_s + _END_GRACE_S)
            end_all(self._engines, _END_GRACE_S)

    async def _start_all(self, children: Sequence[Child], stop: asyncio.Task[Any]) -> int | None:
        """Start children together, and wait until all are ready, one ends or `stop` does.

        Returns:
            The exit code of a child that ended instead; None if no child did.
        """
        for child in children:
            restarted = self._restarts[child.name.partition("-")[0]].inc
            kept = child.keep(self._sockets, self._settings, self._folder, restarted)
            self._tasks.append(asyncio.create_task(kept))

        async def all_ready() -> None:
            for child in children:
                await child.ready.wait()

        ready = asyncio.create_task(all_ready())
        try:
            return await self._wait(ready, stop)
        finally:
            ready.cancel()

    async def _wait(self, *ends: asyncio.Future[Any]) -> int | None:
        """Wait until one future ends, or a child that does not start; return that child's code."""
        await asyncio.wait([*ends, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        return next((task.result() or 1 for task in self._tasks if task.done()), None)


def supervise(settings: Settings, engine_command: tuple[str, ...] = ENGINE_COMMAND) -> int:
    """Serve with several processes; see `Supervisor.run`.

    Raises:
        StartupError: a setting is wrong, the port is taken, or see `Supervisor`.
    """
    if sys.platform == "win32":
        raise StartupError(
            f"frontends is {settings.frontends} and gpus is {settings.gpus}, but on this system "
            "processes cannot share a port: set frontends to 0 and gpus to 1"
        )
    if settings.gpus > 1 and not settings.frontends:
        raise StartupError(
            f"gpus is {settings.gpus}, which needs front ends: set frontends to at least 1"
        )
    if settings.gpus > 1 and settings.device is not Device.CUDA:
        raise StartupError(
            f"gpus is {settings.gpus}, but the device is {settings.device}: "
            "set it to cuda, so that none runs on a CPU"
        )
    begin(settings)
    warn_of_unknown_variables()
    with (
        TemporaryDirectory(prefix="cloze-", ignore_cleanup_errors=True) as folder,
        bind(settings) as listener,
    ):
        return asyncio.run(Supervisor(settings, listener, Path(folder), engine_command).run())
