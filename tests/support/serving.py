"""A real server process on loopback, for tests."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.support.waiting import wait_until

START_TIMEOUT_S = 90.0


def bare_environment(**variables: str) -> dict[str, str]:
    """Return an environment with a path, the given variables, and nothing of a developer's own.

    A child process keeps the variables by which coverage measures it.
    """
    measuring = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
    return {"PATH": "/usr/bin:/bin"} | measuring | variables


@dataclass
class Server:
    url: str
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def reload(self) -> str:
        """Send SIGHUP; return what the log says of the reload."""
        before = len(self.log)
        self.process.send_signal(signal.SIGHUP)
        outcome = re.compile("(?:nothing was )?reloaded: .*")
        wait_until(lambda: any(map(outcome.search, self.log[before:])))
        return next(found[0] for found in map(outcome.search, self.log[before:]) if found)


@contextmanager
def running_server(
    store: Path | None,
    *arguments: str,
    command: tuple[str, ...] = (),
    cwd: Path | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
    **environment: str,
) -> Iterator[Server]:
    """Run ``cloze serve`` on a free port, and end it if it still runs; without a store it serves
    the default one.
    """
    command = command or (sys.executable, "-m", "cloze", "serve")
    env = {k: v for k, v in os.environ.items() if not k.startswith("CLOZE_")} | environment
    chosen = ("--model-store", str(store)) if store else ()
    process = subprocess.Popen(
        [*command, "--port", "0", *chosen, *arguments],
        env=env,
        cwd=cwd,
        stderr=subprocess.PIPE,
        text=True,
    )
    log: list[str] = []
    listening = threading.Event()

    def read() -> None:
        for line in process.stderr:
            log.append(line)
            if "listening on" in line:
                listening.set()
        listening.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert listening.wait(start_timeout_s), "the server did not start"
        found = re.search(r'listening on (https?://[^\s"]+)', "".join(log))
        assert found, "".join(log)
        server = Server(found[1].replace("0.0.0.0", "127.0.0.1"), process, log)
        wait_until_ready(server, start_timeout_s)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()  # so that several processes tidy up
            try:
                process.wait(3)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        reader.join()
        process.stderr.close()


def wait_until_ready(server: Server, longest_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + longest_s
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{server.url}/readyz", verify=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.02)  # it takes the port before it listens
    raise AssertionError("the server did not become ready: " + "".join(server.log))


def children(parent: int, name: str) -> list[int]:
    """Processes that the supervisor started under that name."""
    found = []
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with suppress(OSError):
            if f'"name": "{name}' in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(int(pid))
    return found


def peaks_mb(pid: int) -> dict[int, float]:
    """The largest resident memory so far, of a server and of its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    peaks = {}
    for process in (pid, *map(int, children)):
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
        assert found
        peaks[process] = int(found[1]) / 1024
    return peaks
