"""Several replicas behind HAProxy: how it should choose, and what the end of a replica costs.

    python bench/studies/balancer.py [BUNDLE] [--store DIR] [--replicas 3] [--seconds 10]

Three replicas share this machine's cores, each with one worker. A closed loop sends single texts,
and every twentieth request has 64. Then one replica is killed in the middle of a load.
"""

import argparse
import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import uvloop

from cloze.bench.errors import BenchError
from cloze.bench.http_client import Request
from cloze.bench.load import LoadResult, closed_loop
from cloze.bench.processes import RunningServer
from cloze.bench.servers import MeasuredServer
from cloze.bench.texts import make_texts, words_of
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT

CONFIGURATION: Final = Path(__file__).resolve().parents[2] / "docs" / "haproxy.cfg"
CLIENTS: Final = 24
_SHORT, _LONG = "one text", "64 texts"


def configuration(addresses: Sequence[str], port: int, balance: str = "leastconn") -> str:
    """Return the documented configuration, for other addresses."""
    text = re.sub(r"^    server .*\n", "", CONFIGURATION.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^    bind .*$", f"    bind 127.0.0.1:{port}", text, flags=re.MULTILINE)
    text = re.sub(r"^    balance .*$", f"    balance {balance}", text, flags=re.MULTILINE)
    servers = (f"    server replica{n} {address}\n" for n, address in enumerate(addresses))
    return text.rstrip() + "\n" + "".join(servers)


@contextmanager
def balancing(addresses: Sequence[str], folder: Path, balance: str = "leastconn") -> Iterator[str]:
    """Run HAProxy before servers, and return its URL.

    Raises:
        BenchError: HAProxy does not start.
    """
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    file = folder / "haproxy.cfg"
    file.write_text(configuration(addresses, port, balance))
    process = subprocess.Popen(
        ["haproxy", "-db", "-f", str(file)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise BenchError("HAProxy does not start") from None
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate()


def requests_of(subject: MeasuredServer, texts: Sequence[str]) -> list[Request]:
    """Return single texts, and every twentieth request with 64."""
    single = subject.single_requests(texts, [_SHORT] * len(texts))
    for number in range(0, len(single), 20):
        (several,) = subject.requests(texts[number : number + 64], each=64)
        single[number] = replace(several, group=_LONG)
    return single


async def load_with_a_loss(
    url: str, requests: Sequence[Request], victim: RunningServer, seconds: float
) -> LoadResult:
    """Return the result of a load during which a replica is killed."""
    load = asyncio.create_task(closed_loop(url, requests, clients=CLIENTS, seconds=seconds))
    await asyncio.sleep(seconds / 2)
    os.kill(victim.pid, signal.SIGKILL)
    return await load


def _row(name: str, load: LoadResult) -> str:
    cells = []
    for group in (_SHORT, _LONG):
        latencies = load.by_group[group]
        cells += [f"{latencies.get_value_at_percentile(p) / 1000:.0f}" for p in (50, 99)]
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(load.statuses.items()))
    return f"| {name} | {load.requests / load.seconds:.0f} | {' | '.join(cells)} | {statuses} |"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", nargs="?", default="cloze-bert")
    parser.add_argument("--store", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    options = parser.parse_args()
    bundle = Store(options.store).open(options.bundle)
    command = (sys.executable, "-m", "cloze", "serve", "--port", "{port}", "--workers", "1")
    model = ("--model", options.bundle, "--model-store", str(options.store))
    subject = MeasuredServer("Cloze", (*command, *model), "/embed", "/healthz")
    requests = requests_of(subject, make_texts(words_of(bundle), 2000, "questions").texts)
    print("| | requests /s | one text p50 ms | p99 | 64 texts p50 | p99 | statuses |")
    print("|---|---|---|---|---|---|---|")
    with ExitStack() as stack:
        replicas = [stack.enter_context(subject.start()) for _ in range(options.replicas)]
        addresses = [replica.url.removeprefix("http://") for replica in replicas]

        def measure(name: str, balance: str, *, loss: bool = False) -> None:
            with balancing(addresses, options.folder, balance) as url:
                work = (
                    load_with_a_loss(url, requests, replicas[0], options.seconds)
                    if loss
                    else closed_loop(url, requests, clients=CLIENTS, seconds=options.seconds)
                )
                print(_row(name, uvloop.run(work)), flush=True)

        for replica in replicas:
            uvloop.run(closed_loop(replica.url, requests, clients=8, seconds=1))
        direct = closed_loop(replicas[0].url, requests, clients=CLIENTS, seconds=options.seconds)
        print(_row("one replica, no balancer", uvloop.run(direct)), flush=True)
        for balance in ("roundrobin", "random(2)", "leastconn"):
            measure(balance, balance)
        measure("leastconn, one replica killed", "leastconn", loss=True)


if __name__ == "__main__":
    main()
