"""The children of the supervisor: how they start, what they report, and when they start again."""

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from pydantic import TypeAdapter

from cloze.service.core import StartupError
from cloze.service.observe.processes import forget_process, share_folder, write_as
from cloze.service.server.startup import begin, memory_problem
from cloze.service.settings import Settings

log = logging.getLogger("cloze")

ENGINE_COMMAND = (sys.executable, "-m", "cloze.service.processes.engine_process")
FRONTEND_COMMAND = (sys.executable, "-m", "cloze.service.processes.frontend")

_BACKLOG = 1024
"""Front ends that may wait for an engine process: at most 256, and some that died meanwhile."""

BEAT_S = 1.0
"""Time between a child's reports that its event loop runs."""

_PR_SET_PDEATHSIG = 1
"""Of Linux's ``prctl``."""

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


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """The configuration of a child process, which is its only argument.

    Attributes:
        engine_sockets: of all engine processes, which accept front ends there.
        ready: descriptor to which the child writes a byte when it is ready, and then regularly.
        listener: descriptor of the listening socket: of an engine its own, of a front end that of
            HTTP.
        device_id: which GPU; for an engine.
        parent: the supervisor's process id.
    """

    name: str
    engine_sockets: tuple[Path, ...]
    ready: int
    listener: int
    device_id: int
    parent: int
    settings: Settings

    def to_argument(self) -> str:
        """Return the configuration as JSON."""
        return json.dumps(TypeAdapter(ChildConfig).dump_python(self, mode="json"))

    @classmethod
    def from_arguments(cls) -> "ChildConfig":
        """Return this process's configuration; from now on the process ends with its parent."""
        config = TypeAdapter(cls).validate_json(sys.argv[1])
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != config.parent:  # the parent ended before the call
            os._exit(1)
        return config

    def report_ready(self) -> None:
        """Report that the child is ready, and from now on that its event loop runs.

        Call this once, on the event loop. The supervisor replaces a child whose reports stop.
        """
        os.set_blocking(self.ready, False)
        self._beat(asyncio.get_running_loop())

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(BlockingIOError, BrokenPipeError):  # the supervisor is stopped, or ends
            os.write(self.ready, b"1")
        loop.call_later(BEAT_S, self._beat, loop)


def run_child(serve: Callable[[ChildConfig], Coroutine[Any, Any, None]]) -> int:
    """Run this process as a child of the supervisor; return its exit code."""
    config = ChildConfig.from_arguments()
    begin(config.settings)
    write_as(config.name)
    try:
        uvloop.run(serve(config))
    except Exception as error:
        problem = memory_problem(error)
        if problem is None and not isinstance(error, StartupError):
            raise
        sys.stderr.write(f"cloze: {problem or error}\n")
        return 2
    return 0


@dataclass(slots=True, eq=False)
class Child:
    """A process that the supervisor keeps running.

    Attributes:
        name: for the log and the metrics.
        command: without the configuration.
        process: None while the child waits to be started.
        started: when the process was started, or will be.
        delay_s: before the next restart.
        reports: the descriptor on which the child reports that it runs; None: not started.
        heard: `time.monotonic` time of its last report; None before the first.
        is_ready: whether the child has been ready once; only then it is started again.
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
    is_ready: bool = False

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return self.name.partition("-")[0]

    def start(self, sockets: tuple[Path, ...], settings: Settings, folder: Path) -> None:
        """Start a process, which reports when it is ready.

        Its metrics go to a folder, as those of all processes.

        Raises:
            OSError: the system has no memory, process or descriptor left.
        """
        ready, ready_writer = os.pipe()
        listener = self.listener.fileno()
        config = ChildConfig(
            self.name, sockets, ready_writer, listener, self.device_id, os.getpid(), settings
        )
        try:
            self.process = subprocess.Popen(
                [*self.command, config.to_argument()],
                pass_fds=[ready_writer, listener],
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


def listen_for_front_ends(path: Path) -> socket.socket:
    """Return a Unix socket that listens; connections wait until an engine process accepts them."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(os.fspath(path))
    except OSError as error:  # a path has at most 107 bytes
        listener.close()
        raise StartupError(
            f"cannot listen on {path}: {error}; set TMPDIR to a short path"
        ) from error
    listener.listen(_BACKLOG)
    return listener
