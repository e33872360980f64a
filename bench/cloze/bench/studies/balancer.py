"""Several replicas behind HAProxy: how it should choose, and what the end of a replica costs.

    python bench/studies/balancer.py [BUNDLE] [--store DIR] [--replicas 3] [--seconds 10]

Three replicas share this machine's cores, each with one worker. A closed loop sends single texts,
and every twentieth request has 64. Then one replica is killed in the middle of a load.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import uvloop

from cloze.bench.haproxy import CLIENTS, balancing, load_with_a_loss
from cloze.bench.http_client import Request
from cloze.bench.load import LoadResult, closed_loop
from cloze.bench.servers import MeasuredServer
from cloze.bench.texts import make_texts, words_of
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT

_SHORT, _LONG = "one text", "64 texts"


def requests_of(subject: MeasuredServer, texts: Sequence[str]) -> list[Request]:
    """Return single texts, and every twentieth request with 64."""
    single = subject.single_requests(texts, [_SHORT] * len(texts))
    for number in range(0, len(single), 20):
        (several,) = subject.requests(texts[number : number + 64], each=64)
        single[number] = replace(several, group=_LONG)
    return single


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
