"""Starts engine processes and front ends, restarts those that die, and ends them in order.

The supervisor binds every socket: the HTTP port, and a Unix socket per engine process. A socket
outlives the processes that accept on it. Speaks no HTTP.
"""

import logging
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from cloze.service.core import NEEDS_ROLL, Device, StartupError
from cloze.service.models.served_models import open_bundles
from cloze.service.observe.processes import count_restarts
from cloze.service.processes.children import (
    ENGINE_COMMAND,
    FRONTEND_COMMAND,
    KINDS,
    Child,
    end_all,
    listen_for_front_ends,
)
from cloze.service.server.listen import bind, listen
from cloze.service.server.startup import begin, warn_of_unknown_variables
from cloze.service.settings import Settings

log = logging.getLogger("cloze")

_LOOK_EVERY_S = 1.0
"""Time between looks at the children."""

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
        self._restarts = count_restarts(folder, KINDS)
        self._sockets = tuple(folder / f"engine-{n}.sock" for n in range(settings.gpus))
        self._engines = [
            Child(f"engine-{n}", engine_command, listen_for_front_ends(path), n)
            for n, path in enumerate(self._sockets)
        ]
        self._front_ends = [
            Child(f"frontend-{n}", FRONTEND_COMMAND, listener) for n in range(settings.frontends)
        ]
        self._stopping = self._hung_up = False
        self._signals, writer = os.pipe()  # readable after a signal
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        # SIGCHLD writes to the pipe, and so wakes the loop, only if it has a handler.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT.

        Returns:
            The exit code: 0 after a drain, or the code of a child that did not start.

        Raises:
            StartupError: another program listens on the port.
        """
        try:
            if (code := self._start_all(self._engines)) is not None:
                return code
            if self._stopping:
                return 128 + signal.SIGTERM
            listen(self._listener, self._settings)
            if (code := self._start_all(self._front_ends)) is not None:
                return code
            log.info("%d front ends are ready", len(self._front_ends))
            while not self._stopping:
                self._tend()
                self._wait()
            return 0
        finally:
            # Clients would go on to queue for a server that ends.
            self._listener.close()
            drain_s = self._settings.drain_s + self._settings.shutdown_grace_ms / 1000
            end_all(self._front_ends, drain_s + _END_GRACE_S)
            end_all(self._engines, _END_GRACE_S)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._hung_up = True
        else:
            self._stopping = True

    # ---- children -------------------------------------------------------------------------------

    def _start_all(self, children: Sequence[Child]) -> int | None:
        """Start children together, and wait until all are ready or a signal arrives.

        Returns:
            The exit code of the first child that ended instead; None if no child did.
        """
        starting = list(children)
        for child in starting:
            child.start(self._sockets, self._settings, self._folder)
        while starting and not self._stopping:
            self._tend()
            self._wait()
            for child in starting.copy():
                assert child.process is not None
                if child.heard is not None:
                    starting.remove(child)
                    child.is_ready = True
                elif (code := child.process.poll()) is not None:
                    return code or 1
        return None

    def _tend(self) -> None:
        """Note which children ended, and restart those whose delay is over."""
        for child in (*self._engines, *self._front_ends):
            if not child.is_ready:
                continue
            if child.process is not None:
                if (code := child.process.poll()) is not None:
                    child.note_end(code, self._folder)
                    self._restarts[child.kind].inc()
            elif time.monotonic() >= child.started:
                try:  # its peers see when it is ready
                    child.start(self._sockets, self._settings, self._folder)
                except OSError as error:
                    child.postpone(f"does not start ({error.strerror})")

    def _wait(self) -> None:
        """Wait until a child reports or ends, a restart is due, or a signal arrives."""
        children = (*self._engines, *self._front_ends)
        starts = [child.started for child in children if child.is_ready and child.process is None]
        longest_s = max(0.0, min(starts) - time.monotonic()) if starts else _LOOK_EVERY_S
        reporting = {child.reports: child for child in children if child.reports is not None}
        asleep = time.monotonic()
        readers = [*reporting, self._signals]
        ready, _, _ = select.select(readers, [], [], min(longest_s, _LOOK_EVERY_S))
        if self._signals in ready:
            os.read(self._signals, 4096)
        if self._hung_up:
            self._hung_up = False
            log.error("%s", NEEDS_ROLL)
        for descriptor in reporting.keys() & ready:
            reporting[descriptor].listen()
        if time.monotonic() - asleep < 3 * _LOOK_EVERY_S:
            for child in children:
                child.kill_if_silent()
        else:  # all processes were stopped, and the children have not run since
            for child in children:
                child.heard = child.heard and time.monotonic()


def supervise(settings: Settings, engine_command: tuple[str, ...] = ENGINE_COMMAND) -> int:
    """Serve with several processes; see `Supervisor.run`.

    Raises:
        StartupError: a setting is wrong, the port is taken, or see `Supervisor`.
    """
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
        return Supervisor(settings, listener, Path(folder), engine_command).run()
