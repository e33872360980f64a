"""A measured server: how to run it as a process, and how to send texts to it."""

import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import orjson
import psutil

from cloze.bench.errors import BenchError
from cloze.bench.http_client import Request, post

_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server process that is ready."""

    url: str
    pid: int
    ready_s: float

    def cpu_s(self) -> float:
        """Return the processor time of the server and its children so far, in seconds."""
        return self._sum(lambda process: sum(process.cpu_times()[:2]))  # user and system

    def rss_mb(self) -> float:
        """Return the resident memory of the server and its children, in MB."""
        return self._sum(lambda process: process.memory_info().rss / 1e6)

    def pss_mb(self) -> float:
        """Return the memory that the server and its children take from the machine, in MB.

        Resident memory counts a page once per mapping. Here, a page that is mapped several times
        counts once, and one that other processes map too counts in part. The figure is 0 where the
        system does not count so.
        """
        return self._sum(lambda process: getattr(process.memory_full_info(), "pss", 0) / 1e6)

    def _sum(self, value: Callable[[psutil.Process], float]) -> float:
        total = 0.0
        for process in self.processes():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += value(process)
        return total

    def processes(self) -> list[psutil.Process]:
        """Return the server's process, and all its descendants."""
        server = psutil.Process(self.pid)
        return [server, *server.children(recursive=True)]


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(
    command: Sequence[str],
    ready_path: str,
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 180.0,
    log_file: Path | None = None,
) -> Iterator[RunningServer]:
    """Start a server, wait until the server is ready, and stop the server when the context ends.

    Args:
        command: ``{port}`` stands for a free port of the loopback interface.
        ready_path: answers 200 when the server is ready.
        environment: further variables beside this process's variables without ``CLOZE_*``.

    Raises:
        BenchError: the server exited, or was not ready in time; with its last output.
    """
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    own = {name: value for name, value in os.environ.items() if not name.startswith("CLOZE_")}
    with log_file.open("w+b") if log_file else tempfile.TemporaryFile() as stderr:
        started = time.monotonic()
        process = subprocess.Popen(
            [part.replace("{port}", port) for part in command],
            env=own | dict(environment or {}),
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
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:  # urllib's errors are of this type
        return False


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """How to start a server, and how to send texts to the server.

    Attributes:
        command: starts the server, see `running`.
        ready_path: answers 200 when the server is ready.
        texts_field: of the body, holds the texts.
        extra: further fields of the body.
        environment: further variables, see `running`.
        engine: name of the engine alone on the same model; "" for a peer.
    """

    name: str
    command: tuple[str, ...]
    path: str
    ready_path: str
    texts_field: str = "inputs"
    extra: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_timeout_s: float = 180.0
    engine: str = ""

    def start(self) -> AbstractContextManager[RunningServer]:
        """Run the server until the context ends.

        Raises:
            BenchError: the server does not become ready.
        """
        return running(
            self.command,
            self.ready_path,
            environment=self.environment,
            timeout_s=self.ready_timeout_s,
        )

    def requests(self, texts: Sequence[str], *, each: int) -> list[Request]:
        """Return requests of `each` texts; the last one may have fewer.

        A text alone is sent as a string, not as a list.
        """
        requests = []
        for start in range(0, len(texts), each):
            part = texts[start : start + each]
            inputs = part[0] if each == 1 else part
            body = orjson.dumps({self.texts_field: inputs} | dict(self.extra))
            requests.append(Request(post(self.path, body), len(part)))
        return requests
