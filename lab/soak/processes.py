"""The processes of the server that the soak has started: samples of them, and faults."""

import asyncio
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from cloze.bench.errors import BenchError
from cloze.bench.processes import RunningServer

SERVER = "server"
"""Role of the first process: the only one, or the supervisor."""

_NAME = re.compile(r'"name": ?"([a-z]+-\d+)"')
"""The role of a child."""


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process at one time; `role` is `SERVER`, or the supervisor's name of a child."""

    role: str
    pid: int
    rss_mb: float
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """All processes of a server, so many seconds from the start."""

    at_s: float
    processes: tuple[ProcessSample, ...]


def children(server: RunningServer) -> dict[str, int]:
    """Return the process ids of a server's children by role."""
    roles: dict[str, int] = {}
    for process in server.processes()[1:]:
        with suppress(psutil.NoSuchProcess):
            if named := _NAME.search(" ".join(process.cmdline())):
                roles[named[1]] = process.pid
    return roles


def sample(server: RunningServer, at_s: float) -> Sample:
    """Return the processes of a server now."""
    roles = {SERVER: server.pid} | children(server)
    samples = (_sample_process(role, pid) for role, pid in roles.items())
    return Sample(at_s, tuple(process for process in samples if process))


def _sample_process(role: str, pid: int) -> ProcessSample | None:
    """Return a sample; None if the process has ended."""
    try:
        process = psutil.Process(pid)
        rss_mb = process.memory_info().rss / 1e6
        return ProcessSample(role, pid, rss_mb, process.num_fds(), process.num_threads())
    except psutil.NoSuchProcess:
        return None


@contextmanager
def watching(server: RunningServer, every_s: float) -> Iterator[list[Sample]]:
    """Take a sample at equal intervals until the context ends."""
    samples: list[Sample] = []
    ended = threading.Event()
    start = time.perf_counter()

    def run() -> None:
        due = start
        while not ended.wait(max(0.0, due - time.perf_counter())):
            samples.append(sample(server, time.perf_counter() - start))
            due += every_s

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


_LOOK_EVERY_S = 0.05

_REPLACED_WITHIN_S = 40.0
"""A supervisor replaces a stopped process after 8 s, and delays restarts by up to 30 s."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A signal to one kind of process.

    Attributes:
        role: what the role of the process begins with.
        loses_s: seconds in which connections of the process may end; 0: none may.
    """

    name: str
    role: str
    number: signal.Signals
    loses_s: float = 0.0

    @property
    def replaces(self) -> bool:
        """Whether the supervisor replaces the process."""
        return self.role != SERVER


KINDS = {
    kind.name: kind
    for kind in (
        FaultKind("kill-engine", "engine-", signal.SIGKILL),
        FaultKind("kill-frontend", "frontend-", signal.SIGKILL, loses_s=3.0),
        FaultKind("stop-engine", "engine-", signal.SIGSTOP),
        FaultKind("stop-frontend", "frontend-", signal.SIGSTOP, loses_s=13.0),
        FaultKind("reload", SERVER, signal.SIGHUP),
    )
}


@dataclass(slots=True)
class Fault:
    """A fault that happened.

    Attributes:
        at_s: seconds from the start of the load.
        replaced_s: seconds until another process had its role; None: none in time.
    """

    at_s: float
    kind: FaultKind
    role: str
    replaced_s: float | None = None

    @property
    def replaced(self) -> str:
        """The seconds in a table."""
        return "" if self.replaced_s is None else f"{self.replaced_s:.1f}"

    def explains_loss(self, at_s: float) -> bool:
        """Return whether a connection that ended then may have ended because of the fault."""
        return self.at_s - 0.5 <= at_s <= self.at_s + self.kind.loses_s + 0.5 and bool(
            self.kind.loses_s
        )


def schedule(
    kinds: Sequence[FaultKind], first_s: float, last_s: float, every_s: float
) -> list[tuple[float, FaultKind]]:
    """Return times at equal intervals, and the kinds in turn."""
    if not kinds:
        return []
    count = int((last_s - first_s) / every_s) + 1
    times = [first_s + number * every_s for number in range(count)]
    return list(zip(times, itertools.cycle(kinds), strict=False))


async def inject(server: RunningServer, plan: Sequence[tuple[float, FaultKind]]) -> list[Fault]:
    """Send the signals, and wait until all processes are replaced."""
    start = time.perf_counter()
    faults: list[Fault] = []
    turns: dict[str, itertools.count[int]] = {kind.role: itertools.count() for _, kind in plan}
    async with asyncio.TaskGroup() as tasks:
        for at_s, kind in plan:
            await asyncio.sleep(start + at_s - time.perf_counter())
            role, pid = await _target(server, kind, next(turns[kind.role]))
            os.kill(pid, kind.number)
            fault = Fault(time.perf_counter() - start, kind, role)
            faults.append(fault)
            if kind.replaces:
                tasks.create_task(_await_replacement(server, fault, pid))
    return faults


async def _target(server: RunningServer, kind: FaultKind, turn: int) -> tuple[str, int]:
    """Return the role and the id of a process; the processes of one kind take turns.

    Raises:
        BenchError: no such process runs for too long.
    """
    if not kind.replaces:
        return SERVER, server.pid
    end = time.perf_counter() + _REPLACED_WITHIN_S
    while time.perf_counter() < end:
        running = sorted(child for child in children(server).items() if kind.role in child[0])
        if running:
            return running[turn % len(running)]
        await asyncio.sleep(_LOOK_EVERY_S)
    raise BenchError(f"no process {kind.role}* runs for {_REPLACED_WITHIN_S:g} s")


async def _await_replacement(server: RunningServer, fault: Fault, pid: int) -> None:
    start = time.perf_counter()
    while (seconds := time.perf_counter() - start) < _REPLACED_WITHIN_S:
        if children(server).get(fault.role, pid) != pid:
            fault.replaced_s = seconds
            return
        await asyncio.sleep(_LOOK_EVERY_S)
