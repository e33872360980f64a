"""Runs HAProxy with the documented configuration before several servers."""

import asyncio
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from cloze.bench.errors import BenchError
from cloze.bench.http_client import Request
from cloze.bench.load import LoadResult, closed_loop
from cloze.bench.processes import RunningServer, free_port

CONFIGURATION: Final = Path(__file__).resolve().parents[2] / "docs" / "haproxy.cfg"
CLIENTS: Final = 24


def configuration(addresses: Sequence[str], port: int) -> str:
    """Return the documented configuration, for other addresses."""
    text = re.sub(r"^    server .*\n", "", CONFIGURATION.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^    bind .*$", f"    bind 127.0.0.1:{port}", text, flags=re.MULTILINE)
    servers = (f"    server replica{n} {address}\n" for n, address in enumerate(addresses))
    return text.rstrip() + "\n" + "".join(servers)


@contextmanager
def balancing(addresses: Sequence[str], folder: Path) -> Iterator[str]:
    """Run HAProxy before servers, and return its URL.

    Raises:
        BenchError: HAProxy does not start.
    """
    port = free_port()
    file = folder / "haproxy.cfg"
    file.write_text(configuration(addresses, port))
    with listening(["haproxy", "-db", "-f", str(file)], port) as url:
        yield url


@contextmanager
def listening(command: Sequence[str], port: int) -> Iterator[str]:
    """Run a balancer, and return its URL when its port answers.

    Raises:
        BenchError: The balancer does not start.
    """
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise BenchError(f"{command[0]} does not start") from None
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate()


async def load_with_a_loss(
    url: str, requests: Sequence[Request], victim: RunningServer, seconds: float
) -> LoadResult:
    """Return the result of a load during which a replica is killed."""
    load = asyncio.create_task(closed_loop(url, requests, clients=CLIENTS, seconds=seconds))
    await asyncio.sleep(seconds / 2)
    psutil.Process(victim.pid).kill()
    return await load
