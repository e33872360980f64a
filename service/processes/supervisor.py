"""Starts engine processes and front ends, restarts those that die, and ends them in order."""

import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from service import server
from service.core import Device, StartupError
from service.metrics import forget_process, share_folder
from service.processes.start import ChildConfig
from service.served_models import open_bundles
from service.settings import Settings

log = logging.getLogger("cloze")

ENGINE_COMMAND = (sys.executable, "-m", "service.processes.engine_process")
FRONTEND_COMMAND = (sys.executable, "-m", "service.processes.frontend")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 30.0
"""Before a process that died is started again; doubled each time."""

_STEADY_S = 60.0
"""After a process has lived so long, its next wait is the first again."""

_END_GRACE_S = 10.0


@dataclass(slots=True)
class Child:
    """A process that is to run for ever.

    Attributes:
        name: for the log, and for an engine's socket.
        device_id: which GPU; None for a front end.
        process: None while it waits to be started.
        ended: descriptor that can be read once it has; of a process.
        started: when it was, or will be.
        wait_s: before the next start.
    """

    name: str
    device_id: int | None
    process: subprocess.Popen[bytes] | None = None
    ended: int = -1
    started: float = 0.0
    wait_s: float = field(default=_FIRST_WAIT_S)


class Supervisor:
    """The processes of one server.

    Args:
        settings: with at least one front end.
        engine_command: starts an engine process.

    Raises:
        StartupError: the store is empty, or a bundle does not open.
    """

    def __init__(
        self, settings: Settings, engine_command: tuple[str, ...] = ENGINE_COMMAND
    ) -> None:
        # With versions: a restarted process must serve what the other processes serve, whatever
        # was published since.
        references = tuple(bundle.manifest.reference for bundle in open_bundles(settings))
        self._settings, self._engine_command = (
            settings.model_copy(update={"model": references}),
            engine_command,
        )
        self._engines = [Child(f"engine-{number}", number) for number in range(settings.gpus)]
        self._front_ends = [
            Child(f"frontend-{number}", None) for number in range(settings.frontends)
        ]
        self._stopping = False
        self._signalled, told = os.pipe()  # can be read after a signal
        os.set_blocking(self._signalled, False)
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told)

    def run(self) -> int:
        """Until SIGTERM or SIGINT.

        Returns:
            The exit code: 0 after a drain; that of a process that did not even start.

        Raises:
            StartupError: the port is taken.
        """
        server.begin(self._settings)
        server.warn_of_unknown_variables()
        listener = server.bind(self._settings)
        self._folder = Path(tempfile.mkdtemp(prefix="cloze-"))
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)
            if (code := self._start_all(self._engines, listener)) is not None:
                return code
            if self._stopping:
                return 128 + signal.SIGTERM
            server.listen(listener, self._settings)
            if (code := self._start_all(self._front_ends, listener)) is not None:
                return code
            while not self._stopping:
                self._tend(listener)
                self._wait()
            return 0
        finally:
            listener.close()  # ours too, or clients would go on to queue for a server that ends
            self._end(self._front_ends, self._settings.shutdown_grace_ms / 1000 + _END_GRACE_S)
            self._end(self._engines, _END_GRACE_S)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _on_signal(self, _: int, __: FrameType | None) -> None:
        self._stopping = True

    def _start_all(self, children: list[Child], listener: socket.socket) -> int | None:
        """Start processes and wait until all are ready; return the exit code of one that ended."""
        waiting = {self._start(child, listener): child for child in children}
        try:
            while waiting:
                for descriptor in waiting.keys() & self._readable(list(waiting)):
                    if not os.read(descriptor, 1):  # its end was closed, and nothing said
                        process = waiting[descriptor].process
                        assert process is not None
                        return process.wait() or 1
                    waiting.pop(descriptor)
                    os.close(descriptor)
                if self._stopping:
                    break
            return None
        finally:
            for descriptor in waiting:
                os.close(descriptor)

    def _start(self, child: Child, listener: socket.socket) -> int:
        """Start a process; returns the descriptor that says when it is ready."""
        ready, say_ready = os.pipe()
        try:
            self._spawn(child, say_ready, listener)
        except OSError:
            os.close(ready)
            raise
        finally:
            os.close(say_ready)
        child.started = time.monotonic()
        return ready

    def _wait(self) -> None:
        """Until a child ends, the time comes to start one again, or a signal."""
        children = (*self._engines, *self._front_ends)
        starts = [child.started for child in children if child.process is None]
        timeout_s = max(0.0, min(starts) - time.monotonic()) if starts else None
        self._readable([child.ended for child in children if child.process is not None], timeout_s)

    def _readable(self, descriptors: list[int], timeout_s: float | None = None) -> list[int]:
        """Those that can be read; waits until one can, a signal comes, or the time is over."""
        ready, _, _ = select.select([*descriptors, self._signalled], [], [], timeout_s)
        if self._signalled in ready:
            os.read(self._signalled, 4096)
        return ready

    def _spawn(self, child: Child, say_ready: int, listener: socket.socket) -> None:
        is_engine = child.device_id is not None
        config = ChildConfig(
            folder=self._folder,
            name=child.name,
            engines=tuple(engine.name for engine in self._engines),
            ready=say_ready,
            listener=-1 if is_engine else listener.fileno(),
            device_id=child.device_id or 0,
            parent=os.getpid(),
            settings=self._settings,
        )
        child.process = subprocess.Popen(
            [*(self._engine_command if is_engine else FRONTEND_COMMAND), config.to_argument()],
            pass_fds=[say_ready] if is_engine else [say_ready, listener.fileno()],
            env=os.environ | share_folder(self._folder),
            start_new_session=True,  # Ctrl-C is for us: front ends finish before engines end
        )
        try:
            child.ended = os.pidfd_open(child.process.pid)
        except OSError:  # no descriptor left
            child.process.kill()
            child.process.wait()
            child.process = None
            raise

    def _tend(self, listener: socket.socket) -> None:
        """See who died, and start those again whose wait is over."""
        for child in (*self._engines, *self._front_ends):
            now = time.monotonic()
            if child.process is None:
                if now >= child.started:
                    self._start_again(child, listener)
            elif (code := child.process.poll()) is not None:
                forget_process(self._folder, child.name)
                os.close(child.ended)
                if now - child.started > _STEADY_S:
                    child.wait_s = _FIRST_WAIT_S
                child.process = None
                self._postpone(child, f"ended with {code}")

    def _start_again(self, child: Child, listener: socket.socket) -> None:
        try:
            os.close(self._start(child, listener))  # when it is ready, its peers notice
        except OSError as error:  # no memory, no process left: the others go on
            self._postpone(child, f"does not start ({error.strerror})")

    @staticmethod
    def _postpone(child: Child, why: str) -> None:
        log.error("%s %s; it starts again in %.2g s", child.name, why, child.wait_s)
        child.started = time.monotonic() + child.wait_s
        child.wait_s = min(child.wait_s * 2, _LONGEST_WAIT_S)

    def _end(self, children: list[Child], grace_s: float) -> None:
        """SIGTERM to all, and wait; SIGKILL to whoever has not ended by then."""
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
        StartupError: a setting does not fit, or see `Supervisor`.
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
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        raise StartupError(
            f"front ends need pidfd_open, which this system refuses ({error}): set frontends to 0"
        ) from error
    return Supervisor(settings, engine_command).run()
