"""Starts engine processes and front ends, restarts those that die, and ends them in order.

The supervisor binds every socket: the HTTP port, and a Unix socket per engine process. A socket
outlives the processes that accept on it. Speaks no HTTP.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from cloze.service import server
from cloze.service.core import Device, StartupError
from cloze.service.metrics import forget_process, share_folder
from cloze.service.processes.start import ChildConfig
from cloze.service.served_models import open_bundles
from cloze.service.settings import Settings

log = logging.getLogger("cloze")

ENGINE_COMMAND = (sys.executable, "-m", "cloze.service.processes.engine_process")
FRONTEND_COMMAND = (sys.executable, "-m", "cloze.service.processes.frontend")

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.25, 30.0
"""Before a child that died is restarted; doubled at each restart."""

_STEADY_S = 60.0
"""Reset the restart delay after a child has run for this long."""

_SILENT_S = 8.0
"""Replace a child whose event loop has not run for this long; it reports every `BEAT_S`."""

_START_S = 600.0
"""Replace a child that is not ready for this long after its start."""

_LOOK_EVERY_S = 1.0
"""Time between looks at the children."""

_END_GRACE_S = 10.0

_BACKLOG = 1024
"""Front ends that may wait for an engine process: at most 256, and some that died meanwhile."""


@dataclass(slots=True)
class Child:
    """A process that the supervisor keeps running.

    Attributes:
        name: for the log and the metrics.
        command: without the configuration.
        listener: the socket on which the child accepts connections.
        device_id: which GPU; for an engine.
        process: None while the child waits to be started.
        started: when the process was started, or will be.
        delay_s: before the next restart.
        reports: the descriptor on which the child reports that it runs; None: not started.
        heard: `time.monotonic` time of its last report; None before the first.
    """

    name: str
    command: tuple[str, ...]
    listener: socket.socket
    device_id: int = 0
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    delay_s: float = field(default=_FIRST_DELAY_S)
    reports: int | None = None
    heard: float | None = None

    def listen(self) -> bool:
        """Read the reports of the child; return whether there are any."""
        assert self.reports is not None
        if os.read(self.reports, 4096):
            self.heard = time.monotonic()
            return True
        self.close_reports()  # the child has ended
        return False

    def close_reports(self) -> None:
        """Stop to listen."""
        if self.reports is not None:
            os.close(self.reports)
        self.reports = self.heard = None

    def postpone(self, reason: str) -> None:
        """Schedule the next start."""
        log.error("%s %s; it starts again in %.2g s", self.name, reason, self.delay_s)
        self.process = None
        self.started = time.monotonic() + self.delay_s
        self.delay_s = min(self.delay_s * 2, _LONGEST_DELAY_S)


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
        # By version: a restarted process must not serve what was published in the meantime.
        references = tuple(bundle.manifest.reference for bundle in open_bundles(settings))
        self._settings = settings.model_copy(update={"model": references})
        self._listener = listener
        self._folder = folder
        self._sockets = tuple(folder / f"engine-{n}.sock" for n in range(settings.gpus))
        self._engines = [
            Child(path.stem, engine_command, _listen(path), device_id)
            for device_id, path in enumerate(self._sockets)
        ]
        self._front_ends = [
            Child(f"frontend-{number}", FRONTEND_COMMAND, listener)
            for number in range(settings.frontends)
        ]
        self._ready: list[Child] = []  # once ready, a child is kept running
        self._stopping = False
        self._signals = _signal_pipe()
        # SIGCHLD writes to the pipe, and so wakes the loop, only if it has a handler.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
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
            server.listen(self._listener, self._settings)
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
            _end(self._front_ends, self._settings.shutdown_grace_ms / 1000 + _END_GRACE_S)
            _end(self._engines, _END_GRACE_S)
            for child in self._engines:
                child.listener.close()

    def _on_signal(self, _: int, __: FrameType | None) -> None:
        self._stopping = True

    def _start_all(self, children: Sequence[Child]) -> int | None:
        """Start children together, and wait until all are ready or a signal arrives.

        Returns:
            The exit code of the first child that ended instead; None if no child did.
        """
        starting = list(children)
        for child in starting:
            self._start(child)
        while starting and not self._stopping:
            self._tend()
            self._wait()
            for child in starting.copy():
                assert child.process is not None
                if child.heard is not None:
                    starting.remove(child)
                    self._ready.append(child)
                elif (code := child.process.poll()) is not None:
                    return code or 1
        return None

    def _start(self, child: Child) -> None:
        """Start a process, which reports when it is ready.

        Raises:
            OSError: the system has no memory, process or descriptor left.
        """
        ready, ready_writer = os.pipe()
        config = ChildConfig(
            name=child.name,
            engine_sockets=self._sockets,
            ready=ready_writer,
            listener=child.listener.fileno(),
            device_id=child.device_id,
            parent=os.getpid(),
            settings=self._settings,
        )
        try:
            child.process = subprocess.Popen(
                [*child.command, config.to_argument()],
                pass_fds=[ready_writer, child.listener.fileno()],
                env=os.environ | share_folder(self._folder),
                # Ctrl-C reaches the supervisor alone: front ends finish before engines end.
                start_new_session=True,
            )
        except OSError:
            os.close(ready)
            raise
        finally:
            os.close(ready_writer)
        child.started = time.monotonic()
        child.close_reports()
        child.reports = ready

    def _wait(self) -> None:
        """Wait until a child reports or ends, a restart is due, or a signal arrives."""
        children = (*self._engines, *self._front_ends)
        starts = [child.started for child in self._ready if child.process is None]
        longest_s = max(0.0, min(starts) - time.monotonic()) if starts else _SILENT_S
        reporting = {child.reports: child for child in children if child.reports is not None}
        asleep = time.monotonic()
        ready = self._readable(list(reporting), min(longest_s, _LOOK_EVERY_S))
        for descriptor in reporting.keys() & ready:
            reporting[descriptor].listen()
        if time.monotonic() - asleep < 3 * _LOOK_EVERY_S:
            self._end_silent(children)
        else:  # all processes were stopped, and the children have not run since
            for child in children:
                child.heard = child.heard and time.monotonic()

    def _end_silent(self, children: Sequence[Child]) -> None:
        """Kill the children whose event loop has not run for too long."""
        now = time.monotonic()
        for child in children:
            if child.process is None or child.reports is None:
                continue
            longest_s = _START_S if child.heard is None else _SILENT_S
            if now - (child.heard or child.started) < longest_s:
                continue
            log.error("%s has not reported for %.0f s; it is replaced", child.name, longest_s)
            child.close_reports()
            child.process.kill()

    def _readable(self, descriptors: list[int], timeout_s: float | None = None) -> list[int]:
        """Return readable descriptors; wait for one, for a signal, or until the time is over."""
        ready, _, _ = select.select([*descriptors, self._signals], [], [], timeout_s)
        if self._signals in ready:
            os.read(self._signals, 4096)
        return ready

    def _tend(self) -> None:
        """Note which children ended, and restart those whose delay is over."""
        for child in self._ready:
            now = time.monotonic()
            if child.process is None:
                if now >= child.started:
                    self._restart(child)
            elif (code := child.process.poll()) is not None:
                child.close_reports()
                forget_process(self._folder, child.name)
                if now - child.started > _STEADY_S:
                    child.delay_s = _FIRST_DELAY_S
                child.postpone(f"ended with {code}")

    def _restart(self, child: Child) -> None:
        try:
            self._start(child)  # its peers see when it is ready
        except OSError as error:
            child.postpone(f"does not start ({error.strerror})")


def _listen(path: Path) -> socket.socket:
    """Return a Unix socket that listens; connections wait until an engine process accepts them."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
    except OSError as error:  # a path has at most 107 bytes
        listener.close()
        raise StartupError(
            f"cannot listen on {path}: {error}; set TMPDIR to a short path"
        ) from error
    listener.listen(_BACKLOG)
    return listener


def _signal_pipe() -> int:
    """Return a descriptor that becomes readable after a signal."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    return reader


def _end(children: Sequence[Child], grace_s: float) -> None:
    """Send SIGTERM to all children and wait; kill those that have not ended in time."""
    running = [child.process for child in children if child.process is not None]
    for process in running:
        process.terminate()
    end = time.monotonic() + grace_s
    for process in running:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
    server.begin(settings)
    server.warn_of_unknown_variables()
    with (
        TemporaryDirectory(prefix="cloze-", ignore_cleanup_errors=True) as folder,
        server.bind(settings) as listener,
    ):
        return Supervisor(settings, listener, Path(folder), engine_command).run()
