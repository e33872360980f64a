"""A server to be measured, as a process of its own: started, waited for, watched, ended."""

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

from bench.errors import BenchError

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers.

    Attributes:
        url: where.
        pid: of its first process.
        ready_s: from its start until it was ready.
    """

    url: str
    pid: int
    ready_s: float

    def cpu_s(self) -> float:
        """Processor time of it and its children so far, in seconds."""
        return sum(_stat(pid)[0] for pid in _family(self.pid))

    def rss_mb(self) -> float:
        """Resident memory of it and its children, in MB."""
        return sum(_stat(pid)[1] for pid in _family(self.pid))


def free_port() -> int:
    """A port of loopback that nobody has now."""
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
) -> Iterator[Running]:
    """Start a server, wait until it answers, and end it at the end.

    Args:
        command: starts it.
        url: where it will listen.
        ready_path: answers 200 once it is ready.
        environment: instead of this process's.
        timeout_s: for it to become ready.

    Raises:
        BenchError: it ended, or was not ready in time; with its last words.
    """
    with tempfile.TemporaryFile() as said:
        started = time.monotonic()
        process = subprocess.Popen(
            list(command),
            env=None if environment is None else dict(environment),
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
        try:
            while not _answers(url + ready_path):
                code = process.poll()
                if code is not None or time.monotonic() - started > timeout_s:
                    said.seek(0)
                    what = (
                        f"was not ready after {timeout_s:g} s"
                        if code is None
                        else f"ended with {code}"
                    )
                    raise BenchError(
                        f"{' '.join(command[:4])} ... {what}: {said.read().decode(errors='replace')[-1500:].strip()}"
                    )
                time.sleep(0.01)
            yield Running(url, process.pid, time.monotonic() - started)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for parent in found:
        try:
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except OSError:
            continue
        found += [int(child) for child in children.split()]
    return found


def _stat(pid: int) -> tuple[float, float]:
    """Processor seconds and resident MB; zeros if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0, 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS, pages * _PAGE / 1e6
