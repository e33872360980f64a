"""Observes the processes of a server: memory, open files and threads."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cloze.bench.processes import RunningServer, process_tree

SERVER = "server"
"""Role of the first process: the only one, or the supervisor."""

_NAME = re.compile(rb'"name": ?"([a-z]+-\d+)"')
"""The role of a child."""


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process at one time.

    Attributes:
        role: `SERVER`, or the name that the supervisor gave to a child.
        pss_mb: resident memory; each shared page counts in equal parts for its processes.
    """

    role: str
    pid: int
    rss_mb: float
    pss_mb: float
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """All processes of a server at one time.

    Attributes:
        at_s: seconds from the start.
    """

    at_s: float
    processes: tuple[ProcessSample, ...]

    @property
    def pss_mb(self) -> float:
        """Resident memory of all processes."""
        return sum(process.pss_mb for process in self.processes)


def children(server: RunningServer) -> dict[str, int]:
    """Return the process ids of a server's children by role."""
    roles: dict[str, int] = {}
    for pid in process_tree(server.pid)[1:]:
        try:
            named = _NAME.search(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:  # the process has ended
            continue
        if named:
            roles[named[1].decode()] = pid
    return roles


def sample(server: RunningServer, at_s: float) -> Sample:
    """Return the processes of a server now."""
    roles = {SERVER: server.pid} | children(server)
    samples = (_sample_process(role, pid) for role, pid in roles.items())
    return Sample(at_s, tuple(process for process in samples if process))


def _sample_process(role: str, pid: int) -> ProcessSample | None:
    """Return a sample; None if the process has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        memory = _kilobytes((folder / "smaps_rollup").read_text())
        files = len(list((folder / "fd").iterdir()))
        threads = len(list((folder / "task").iterdir()))
    except OSError:
        return None
    if "Rss" not in memory:  # the process is a zombie
        return None
    return ProcessSample(role, pid, memory["Rss"] / 1e3, memory["Pss"] / 1e3, files, threads)


def _kilobytes(rollup: str) -> dict[str, float]:
    """Return the fields of ``smaps_rollup`` in units of 1,000 bytes."""
    rows = (line.split() for line in rollup.splitlines()[1:])
    return {row[0].rstrip(":"): int(row[1]) * 1.024 for row in rows}


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
