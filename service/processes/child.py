"""A child process of the supervisor: how it starts, what it reports, and when it starts again."""

import logging
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloze.service.metrics import forget_process, share_folder
from cloze.service.processes.start import ChildConfig
from cloze.service.settings import Settings

log = logging.getLogger("cloze")

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.25, 30.0
"""Before a child that died is restarted; doubled at each restart."""

KINDS = ("engine", "frontend")
"""The kinds of children, with which their names begin."""

_STEADY_S = 60.0
"""Reset the restart delay after a child has run for this long."""

_SILENT_S = 8.0
"""Replace a child whose event loop has not run for this long; it reports every `BEAT_S`."""

_START_S = 600.0
"""Replace a child that is not ready for this long after its start."""


@dataclass(slots=True, eq=False)
class Child:
    """A process that the supervisor keeps running.

    Attributes:
        name: for the log and the metrics.
        command: without the configuration.
        listeners: the sockets on which the child accepts connections.
        device_id: which GPU; for an engine.
        process: None while the child waits to be started.
        started: when the process was started, or will be.
        delay_s: before the next restart.
        reports: the descriptor on which the child reports that it runs; None: not started.
        heard: `time.monotonic` time of its last report; None before the first.
        is_ready: whether the child has been ready once; only then it is started again.
        is_kept: whether the child is started again when it ends.
    """

    name: str
    command: tuple[str, ...]
    listeners: tuple[socket.socket, ...]
    device_id: int = 0
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    delay_s: float = field(default=_FIRST_DELAY_S)
    reports: int | None = None
    heard: float | None = None
    is_ready: bool = False
    is_kept: bool = True

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return self.name.partition("-")[0]

    def start(self, sockets: tuple[Path, ...], settings: Settings, folder: Path) -> None:
        """Start a process, which reports when it is ready.

        Args:
            sockets: of the engine processes.
            settings: of the process.
            folder: the metrics of all processes.

        Raises:
            OSError: the system has no memory, process or descriptor left.
        """
        ready, ready_writer = os.pipe()
        listeners = tuple(listener.fileno() for listener in self.listeners)
        config = ChildConfig(
            name=self.name,
            engine_sockets=sockets,
            ready=ready_writer,
            listeners=listeners,
            device_id=self.device_id,
            parent=os.getpid(),
            settings=settings,
        )
        try:
            self.process = subprocess.Popen(
                [*self.command, config.to_argument()],
                pass_fds=[ready_writer, *listeners],
                env=os.environ | share_folder(folder),
                # Ctrl-C reaches the supervisor alone: front ends finish before engines end.
                start_new_session=True,
            )
        except OSError:
            os.close(ready)
            raise
        finally:
            os.close(ready_writer)
        self.started = time.monotonic()
        self.reports = ready

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

    def kill_if_silent(self) -> None:
        """Kill the process if its event loop has not run for too long."""
        if self.process is None or self.reports is None:
            return
        longest_s = _START_S if self.heard is None else _SILENT_S
        if time.monotonic() - (self.heard or self.started) < longest_s:
            return
        log.error("%s has not reported for %.0f s; it is replaced", self.name, longest_s)
        self.close_reports()
        self.process.kill()

    def note_end(self, code: int, folder: Path) -> None:
        """Note that the process has ended, and when the next one starts."""
        self.close_reports()
        self.process = None
        forget_process(folder, self.name)
        if not self.is_kept:
            return
        if time.monotonic() - self.started > _STEADY_S:
            self.delay_s = _FIRST_DELAY_S
        self.postpone(f"ended with {code}")

    def postpone(self, reason: str) -> None:
        """Schedule the next start."""
        log.error("%s %s; it starts again in %.2g s", self.name, reason, self.delay_s)
        self.process = None
        self.started = time.monotonic() + self.delay_s
        self.delay_s = min(self.delay_s * 2, _LONGEST_DELAY_S)


def end_all(children: Sequence[Child], grace_s: float) -> None:
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
