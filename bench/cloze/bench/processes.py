"""Runs a measured server as a process: starts it, waits until it is ready, and stops it."""

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cloze.bench.errors import BenchError

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server process that is ready."""

    url: str
    pid: int
    ready_s: float

    def cpu_s(self) -> float:
        """Return the processor time of the server and its children so far, in seconds."""
        return sum(_cpu_s_and_rss_mb(pid)[0] for pid in process_tree(self.pid))

    def rss_mb(self) -> float:
        """Return the resident memory of the server and its children, in MB."""
        return sum(_cpu_s_and_rss_mb(pid)[1] for pid in process_tree(self.pid))

    def pss_mb(self) -> float:
        """Return the memory that the server and its children take from the machine, in MB.

        Resident memory counts a page once per mapping. Here, a page that is mapped several times
        counts once, and one that other processes map too counts in part.
        """
        return sum(map(_pss_mb, process_tree(self.pid)))


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(
    command: Sequence[str],
    url: str,
    ready_path: str,
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 180.0,
    log_file: Path | None = None,
) -> Iterator[RunningServer]:
    """Start a server, wait until the server is ready, and stop the server when the context ends.

    Raises:
        BenchError: the server exited, or was not ready in time; with its last output.
    """
    with log_file.open("w+b") if log_file else tempfile.TemporaryFile() as stderr:
        started = time.monotonic()
        process = subprocess.Popen(
            list(command),
            env=None if environment is None else dict(environment),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        try:
            while not _is_ready(url + ready_path):
                if problem := _start_problem(process, started, timeout_s):
                    title = " ".join(command[:4])
                    raise BenchError(f"{title} ... {problem}: {_last_output(stderr)}")
                time.sleep(0.01)
            yield RunningServer(url, process.pid, time.monotonic() - started)
        finally:
            _stop(process)


def _start_problem(
    process: subprocess.Popen[bytes], started: float, timeout_s: float
) -> str | None:
    code = process.poll()
    if code is not None:
        return f"ended with {code}"
    if time.monotonic() - started > timeout_s:
        return f"was not ready after {timeout_s:g} s"
    return None


def _last_output(stderr: IO[bytes]) -> str:
    """Return the end of the output, as one line."""
    stderr.seek(0)
    lines = (line.strip() for line in stderr.read().decode(errors="replace").splitlines())
    return " / ".join(filter(None, lines))[-600:]


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    pids = [pid]
    for parent in pids:
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except OSError:
            continue
        pids += [int(child) for child in children.split()]
    return pids


def _cpu_s_and_rss_mb(pid: int) -> tuple[float, float]:
    """Return processor seconds and resident MB; zeros if the process has exited."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0, 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, pages * _PAGE_BYTES / 1e6


def _pss_mb(pid: int) -> float:
    """Return the proportional set size in MB; 0 if the process has exited."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("Pss:"))
