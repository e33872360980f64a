"""Observes the processes of a server: memory, open files and threads."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

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
