"""The children of the supervisor: how they start, what they report, and when they start again."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cloze.service.clock import CLOCK, Clock
from cloze.service.errors import StartupError
from cloze.service.machine import end_with_parent
from cloze.service.observe.processes import FOLDER, forget_process, write_as
from cloze.service.server.startup import begin, memory_problem, run_loop
from cloze.service.settings import Settings

log = logging.getLogger("cloze")

ENGINE_COMMAND = (sys.executable, "-m", "cloze.service.processes.engine_process")
FRONTEND_COMMAND = (sys.executable, "-m", "cloze.service.processes.frontend")

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.25, 30.0
"""Seconds before a dead child is restarted; the delay doubles with each restart."""

_LOOK_EVERY_S = 1.0
"""Time between looks at a child that does not report."""

_SILENT_S = 8.0
"""Replace a child whose event loop has not run for this long; it reports every second."""


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
        end_with_parent()
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
        if os.getppid() != self.parent:  # the supervisor has ended without a word
            os._exit(1)
        with suppress(BlockingIOError, BrokenPipeError):  # the supervisor is stopped, or ends
            os.write(self.ready, b"1")
        loop.call_later(1.0, self._beat, loop)


def run_child(serve: Callable[[ChildConfig], Coroutine[Any, Any, None]]) -> int:
    """Run this process as a child of the supervisor; return its exit code."""
    config = ChildConfig.from_arguments()
    begin(config.settings)
    write_as(config.name)
    try:
        run_loop(serve(config))
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
        ready: is set when the child has been ready once; only then it is started again.
    """

    name: str
    command: tuple[str, ...]
    listener: socket.socket
    device_id: int = 0
    clock: Clock = CLOCK
    process: subprocess.Popen[bytes] | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    async def keep(
        self,
        sockets: tuple[Path, ...],
        settings: Settings,
        folder: Path,
        restarted: Callable[[], None],
    ) -> int:
        """Keep a process running, until this coroutine is cancelled.

        Args:
            folder: where the metrics of all processes are.
            restarted: called when a process has ended.

        Returns:
            The exit code of a first process that ends before it is ready.

        Raises:
            OSError: the system has no memory, process or descriptor left for the first process.
        """
        delay_s = _FIRST_DELAY_S
        while True:
            began = self.clock.monotonic()
            try:
                code = await self._watch(await self._start(sockets, settings, folder))
            except OSError as error:
                if not self.ready.is_set():
                    raise
                reason = f"does not start ({error.strerror})"
            else:
                if not self.ready.is_set():
                    return code
                forget_process(folder, self.name)
                restarted()
                if self.clock.monotonic() - began > 60.0:  # it ran well
                    delay_s = _FIRST_DELAY_S
                reason = f"ended with {code}"
            log.error("%s %s; it starts again in %.2g s", self.name, reason, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _LONGEST_DELAY_S)

    async def _start(
        self, sockets: tuple[Path, ...], settings: Settings, folder: Path
    ) -> asyncio.StreamReader:
        """Start a process; return its reports, which end with the process."""
        reader, writer = os.pipe()
        listener = self.listener.fileno()
        config = ChildConfig(
            self.name, sockets, writer, listener, self.device_id, os.getpid(), settings
        )
        try:
            self.process = subprocess.Popen(
                [*self.command, config.to_argument()],
                pass_fds=[writer, listener],
                env=os.environ | {FOLDER: str(folder)},
                # Ctrl-C reaches the supervisor alone: front ends finish before engines end.
                start_new_session=True,
            )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        reports = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reports), os.fdopen(reader, "rb", 0)
        )
        return reports

    async def _watch(self, reports: asyncio.StreamReader) -> int:
        """Return the exit code of the process when it has ended; kill one that does not report.

        Silent looks are counted, not seconds: if all processes were stopped, the children have not
        run since, and no child is replaced.
        """
        assert self.process is not None
        silent_s, longest_s = 0.0, 600.0  # until it is ready
        while silent_s < longest_s:
            try:
                if not await asyncio.wait_for(reports.read(4096), _LOOK_EVERY_S):
                    break
            except TimeoutError:
                silent_s += _LOOK_EVERY_S
            else:
                silent_s, longest_s = 0.0, _SILENT_S
                self.ready.set()
        else:
            log.error("%s has not reported for %.0f s; it is replaced", self.name, longest_s)
            self.process.kill()
        # On a thread: a killed process whose driver hangs may end much later.
        code = await asyncio.to_thread(self.process.wait)
        self.process = None
        return code


def end_all(children: Sequence[Child], grace_s: float, clock: Clock = CLOCK) -> None:
    """Send SIGTERM to all children and wait; kill those that have not ended in time."""
    running = [child.process for child in children if child.process is not None]
    for process in running:
        process.terminate()
    end = clock.monotonic() + grace_s
    for process in running:
        try:
            process.wait(max(0.0, end - clock.monotonic()))
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
    listener.listen(1024)  # at most 256 front ends, and some that died meanwhile
    return listener
