"""Starts engine processes and front ends, restarts those that die, and ends them in order.

The supervisor binds every socket: the HTTP port, and a Unix socket per engine process. A socket
outlives the processes that accept on it. SIGHUP makes it start a new generation of processes, which
serves what the store holds by then. At most two generations run: a further SIGHUP waits until the
older one has ended. Speaks no HTTP.
"""

import asyncio
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from pydantic import TypeAdapter

from cloze.service.core import (
    BUSY,
    Changes,
    Device,
    ReloadRefused,
    ShuttingDown,
    StartupError,
)
from cloze.service.metrics import forget_other_models, forget_process, supervisor_metrics
from cloze.service.processes.children import (
    ENGINE_COMMAND,
    KINDS,
    Child,
    Generation,
    end_generations,
    make_generation,
)
from cloze.service.served_models import kept_reasons, open_bundles
from cloze.service.settings import Settings
from cloze.service.sockets import bind, listen, listening_on_admin_socket
from cloze.service.startup import begin, warn_of_unknown_variables

log = logging.getLogger("cloze")

_LOOK_EVERY_S = 1.0
"""Time between looks at the children."""

_REPORT_FILE = "reload.json"

_REPORT_EVERY_S = 0.05
"""Time between looks at the report of a reload."""


@dataclass(slots=True)
class ReloadReport:
    """What came of the last reload: a file in the folder that all processes of a server share.

    Attributes:
        began: `time.monotonic` time of its begin; the clock is the same in all processes.
        changes: what it changed; None if it was refused, or has not ended.
        error: why it was refused; "" if it was not.
        busy: whether a further reload has to wait: new processes start, or old ones still run.
    """

    began: float = 0.0
    changes: Changes | None = None
    error: str = ""
    busy: bool = False

    def write(self, folder: Path) -> None:
        """Replace the report of the last reload."""
        unfinished = folder / f"{_REPORT_FILE}.new"
        unfinished.write_bytes(_REPORT.dump_json(self))
        unfinished.replace(folder / _REPORT_FILE)

    @classmethod
    def read(cls, folder: Path) -> "ReloadReport":
        """Return the report of the last reload; of none if there was no reload."""
        try:
            return _REPORT.validate_json((folder / _REPORT_FILE).read_bytes())
        except FileNotFoundError:
            return cls()


_REPORT = TypeAdapter(ReloadReport)


class Supervisor:
    """The processes of one server.

    Args:
        settings: with at least one front end.
        listener: the bound HTTP socket.
        admin_listeners: the admin socket, if there is one.
        folder: private to the server; holds the engines' sockets and the metrics.
        engine_command: starts an engine process.

    Raises:
        StartupError: the store is empty, a bundle does not open, or a path is too long.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        admin_listeners: Sequence[socket.socket],
        folder: Path,
        engine_command: tuple[str, ...] = ENGINE_COMMAND,
    ) -> None:
        self._settings, self._folder, self._engine_command = settings, folder, engine_command
        self._listener, self._admin_listeners = listener, admin_listeners
        self._metrics = supervisor_metrics(folder, KINDS)
        self._generations: list[Generation] = []
        self._serving = self._add_generation()
        self._stopping = self._hung_up = self._reloading = False
        self._report = ReloadReport()
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
            if (code := self._start_all(self._serving, self._serving.engines)) is not None:
                return code
            if self._stopping:
                return 128 + signal.SIGTERM
            listen(self._listener, self._settings)
            if (code := self._start_all(self._serving, self._serving.front_ends)) is not None:
                return code
            log.info("%d front ends are ready", len(self._serving.front_ends))
            while not self._stopping:
                self._reload_if_asked()
                self._tend()
                self._wait()
            return 0
        finally:
            # Clients would go on to queue for a server that ends.
            self._listener.close()
            end_generations(self._generations)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._hung_up = True
        else:
            self._stopping = True

    # ---- reload ---------------------------------------------------------------------------------

    def _reload_if_asked(self) -> None:
        """Reload if a signal asked for it and the last reload has ended."""
        if self._hung_up:
            self._hung_up, self._reloading = False, True
            if self._report.busy:
                log.info("a reload waits until the last one has ended")
        if self._reloading and not self._report.busy:
            self._reloading = False
            self._reload()

    def _reload(self) -> None:
        """Replace all processes by some that serve what the store holds now, and report."""
        report = self._report = ReloadReport(began=time.monotonic(), busy=True)
        report.write(self._folder)
        earlier = self._serving
        try:
            self._serving = self._start_next()
        except (StartupError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            report.error, report.busy = f"nothing was reloaded: {reason}", False
            report.write(self._folder)
            self._metrics.observe_reload(ok=False)
            log.error("%s", report.error)
            return
        report.changes = earlier.changes(self._serving, kept_reasons(self._settings))
        report.write(self._folder)
        self._metrics.observe_reload(ok=True)
        log.info("reloaded: %s", report.changes)
        earlier.retire()

    def _start_next(self) -> Generation:
        """Start a generation beside the one that serves, or leave no process of it behind.

        Raises:
            StartupError: a bundle does not open, or a process does not start.
            OSError: the system has no memory, process or descriptor left.
        """
        later = self._add_generation()
        try:
            for children in (later.engines, later.front_ends):
                if (code := self._start_all(later, children)) is not None:
                    raise StartupError(f"a new process ended with {code}; the log says why")
                if self._stopping:
                    raise StartupError("the server is shutting down")
        except (StartupError, OSError):
            later.retire()  # without `Settings.drain_s`: the old processes accept connections
            end_generations([later])
            self._forget(later)
            raise
        return later

    def _add_generation(self) -> Generation:
        """Add a generation for what the store holds now, whose processes have not started.

        Raises:
            StartupError: the store is empty, a bundle does not open, or a path is too long.
        """
        used = {generation.number for generation in self._generations}
        generation = make_generation(
            next(number for number in range(1, len(used) + 2) if number not in used),
            self._settings,
            open_bundles(self._settings).bundles,
            (self._listener, *self._admin_listeners),
            self._folder,
            self._engine_command,
        )
        self._generations.append(generation)
        return generation

    def _forget(self, generation: Generation) -> None:
        """Forget a generation that has ended, and the metric series of models that only it had."""
        self._generations.remove(generation)
        served = [model.reference for other in self._generations for model in other.manifests]
        for child in generation.children:
            forget_process(self._folder, child.name)
            forget_other_models(self._folder, child.name, served)

    # ---- children -------------------------------------------------------------------------------

    def _start_all(self, generation: Generation, children: Sequence[Child]) -> int | None:
        """Start children together, and wait until all are ready or a signal arrives.

        Returns:
            The exit code of the first child that ended instead; None if no child did.
        """
        starting = list(children)
        for child in starting:
            child.start(generation.sockets, generation.settings, self._folder)
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
        """Note which children ended, restart those whose delay is over, end what has retired."""
        for generation in self._generations.copy():
            for child in generation.children:
                if not child.is_ready:
                    continue
                if child.process is not None:
                    if (code := child.process.poll()) is not None:
                        child.note_end(code, self._folder)
                        if child.is_kept:
                            self._metrics.restarts[child.kind].inc()
                elif child.is_kept and time.monotonic() >= child.started:
                    try:  # its peers see when it is ready
                        child.start(generation.sockets, generation.settings, self._folder)
                    except OSError as error:
                        child.postpone(f"does not start ({error.strerror})")
            if generation.ends is not None and generation.end_if_over():
                self._forget(generation)
                self._report.busy = False
                self._report.write(self._folder)

    def _wait(self) -> None:
        """Wait until a child reports or ends, a restart is due, or a signal arrives."""
        children = [child for generation in self._generations for child in generation.children]
        starts = [
            child.started
            for child in children
            if child.is_ready and child.process is None and child.is_kept
        ]
        longest_s = max(0.0, min(starts) - time.monotonic()) if starts else _LOOK_EVERY_S
        reporting = {child.reports: child for child in children if child.reports is not None}
        asleep = time.monotonic()
        readers = [*reporting, self._signals]
        ready, _, _ = select.select(readers, [], [], min(longest_s, _LOOK_EVERY_S))
        if self._signals in ready:
            os.read(self._signals, 4096)
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
        listening_on_admin_socket(settings.admin_socket) as admin,
    ):
        return Supervisor(settings, listener, admin, Path(folder), engine_command).run()


async def ask_supervisor(supervisor: int, folder: Path, is_draining: Callable[[], bool]) -> Changes:
    """Ask the supervisor to reload, by SIGHUP, and return what has changed.

    Args:
        supervisor: its process id.
        folder: that all processes share.
        is_draining: whether this process ends.

    Raises:
        ReloadRefused: the supervisor refused the reload, or another one has not ended.
        ShuttingDown: the server ends.
    """
    if ReloadReport.read(folder).busy:
        raise ReloadRefused(BUSY)
    asked = time.monotonic()
    os.kill(supervisor, signal.SIGHUP)
    while True:
        report = ReloadReport.read(folder)
        if report.began >= asked:
            if report.changes is not None:
                return report.changes
            if report.error:
                raise ReloadRefused(report.error)
        elif report.busy:  # another one began just before
            raise ReloadRefused(BUSY)
        if is_draining():
            raise ShuttingDown("the server is shutting down")
        await asyncio.sleep(_REPORT_EVERY_S)
