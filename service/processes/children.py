"""The children of the supervisor: how they start, what they report, and when they start again.

A `Generation` is the engine processes and front ends of one state of the store. A reload starts a
new generation. The old one answers the connections that it has, and then ends.
"""

import asyncio
import ctypes
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from pydantic import TypeAdapter

from cloze.model_store import Bundle, Manifest
from cloze.service.core import Changes, StartupError
from cloze.service.metrics import forget_process, share_folder, write_as
from cloze.service.settings import Settings
from cloze.service.startup import begin, memory_problem

log = logging.getLogger("cloze")

ENGINE_COMMAND = (sys.executable, "-m", "cloze.service.processes.engine_process")
FRONTEND_COMMAND = (sys.executable, "-m", "cloze.service.processes.frontend")

RETIRE = signal.SIGUSR1
"""Tells a front end to accept no further connection, and to end after those that it has."""

_BACKLOG = 1024
"""Front ends that may wait for an engine process: at most 256, and some that died meanwhile."""

_END_GRACE_S = 10.0

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
        listeners: descriptors of the listening sockets: of an engine its own, of a front end those
            of HTTP.
        device_id: which GPU; for an engine.
        parent: the supervisor's process id.
    """

    name: str
    engine_sockets: tuple[Path, ...]
    ready: int
    listeners: tuple[int, ...]
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

        Its metrics go to a folder, as those of all processes.

        Raises:
            OSError: the system has no memory, process or descriptor left.
        """
        ready, ready_writer = os.pipe()
        listeners = tuple(listener.fileno() for listener in self.listeners)
        config = ChildConfig(
            self.name, sockets, ready_writer, listeners, self.device_id, os.getpid(), settings
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


@dataclass(slots=True, eq=False)
class Generation:
    """The processes that serve one state of the store.

    Attributes:
        number: 1 for the first generation; a later one has a number that no other has then.
        settings: of the processes; they name each bundle with its version.
        sockets: of the engine processes.
        ends: `time.monotonic` time at which a retired generation is ended; None: not retired.
    """

    number: int
    settings: Settings
    manifests: tuple[Manifest, ...]
    sockets: tuple[Path, ...]
    engines: list[Child]
    front_ends: list[Child]
    ends: float | None = field(default=None)

    @property
    def children(self) -> list[Child]:
        """All processes."""
        return [*self.engines, *self.front_ends]

    def retire(self) -> None:
        """Let the front ends finish the connections that they have.

        One that is only starting has none, and ends by the signal at once.
        """
        settings = self.settings
        longest_s = settings.idle_timeout_ms / 1000 + settings.max_timeout_s
        self.ends = time.monotonic() + longest_s
        for child in self.front_ends:
            child.is_kept = False
            if child.process is not None:
                child.process.send_signal(RETIRE)

    def end_if_over(self) -> bool:
        """End the engine processes of a retired generation after its last front end.

        Returns:
            Whether the generation has ended.
        """
        assert self.ends is not None
        if running := [child.process for child in self.front_ends if child.process is not None]:
            if time.monotonic() > self.ends:
                self.ends = math.inf  # their drain has its own limit
                for process in running:
                    process.terminate()
            return False
        end_all(self.engines, _END_GRACE_S)  # they have no work, and so end at once
        self.close()
        return True

    def close(self) -> None:
        """Accept no further front end; all processes have ended."""
        for child in self.children:
            child.close_reports()
        for child, path in zip(self.engines, self.sockets, strict=True):
            child.listeners[0].close()
            path.unlink(missing_ok=True)

    def changes(self, later: "Generation", reasons: Mapping[str, str]) -> Changes:
        """Return how the models of a later generation differ; see `Changes`."""
        before, after = ({m.reference: m for m in g.manifests} for g in (self, later))
        return Changes.between(before, after, reasons)


def end_generations(generations: Sequence[Generation]) -> None:
    """End all processes: the front ends of all generations together, and then the engines.

    Each process gets one signal.
    """
    if not generations:
        return
    settings = generations[0].settings
    drain_s = settings.drain_s + settings.shutdown_grace_ms / 1000
    end_all([child for each in generations for child in each.front_ends], drain_s + _END_GRACE_S)
    end_all([child for each in generations for child in each.engines], _END_GRACE_S)
    for generation in generations:
        generation.close()


def make_generation(
    number: int,
    settings: Settings,
    bundles: list[Bundle],
    listeners: tuple[socket.socket, ...],
    folder: Path,
    engine_command: tuple[str, ...],
) -> Generation:
    """Return a generation whose processes have not started.

    The folder receives the engines' sockets, and the front ends share the listeners.

    Raises:
        StartupError: a path is too long.
    """
    # By version: a restarted process must not serve what was published in the meantime.
    references = tuple(bundle.manifest.reference for bundle in bundles)
    suffix = f".{number}" if number > 1 else ""
    sockets = tuple(folder / f"engine-{n}{suffix}.sock" for n in range(settings.gpus))
    return Generation(
        number,
        settings.model_copy(update={"model": references}),
        tuple(bundle.manifest for bundle in bundles),
        sockets,
        [
            Child(f"engine-{device_id}{suffix}", engine_command, (_listen(path),), device_id)
            for device_id, path in enumerate(sockets)
        ],
        [
            Child(f"frontend-{n}{suffix}", FRONTEND_COMMAND, listeners)
            for n in range(settings.frontends)
        ],
    )


def _listen(path: Path) -> socket.socket:
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
