"""What does a client that fills the server cost the questions of others?

    python bench/studies/bulk_class.py [BUNDLE] [--store DIR] [--shares 0.2 0.5] [--seconds 15]

Questions arrive at random (an open loop), at shares of the rate of a closed loop with 8 clients:
alone, beside a closed loop of lists of 32 passages, and beside the same lists as bulk requests. The
lists come from a process of their own, and all requests from one address.
"""

import argparse
import multiprocessing
import sys
import time
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
import orjson
import uvloop

from cloze.bench.http_client import Request, post
from cloze.bench.load import closed_loop, open_loop, poisson
from cloze.bench.processes import RunningServer
from cloze.bench.servers import MeasuredServer
from cloze.bench.texts import make_texts, words_of
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT

FILLERS = 8
"""Clients that send lists."""

PATIENT = {"x-request-timeout-ms": "240000"}
LOADS = {"none": None, "lists": PATIENT, "bulk lists": PATIENT | {"x-request-class": "bulk"}}
AHEAD_S = 3.0
"""Seconds for which the lists fill the queue before the first question."""


def fill(
    url: str, lists: list[bytes], headers: dict[str, str], seconds: float, rates: "Queue[float]"
) -> None:
    """Send lists, each client the next one as soon as its last is answered."""
    requests = [Request(post("/embed", body, headers), 32) for body in lists]
    load = uvloop.run(closed_loop(url, requests, clients=FILLERS, seconds=seconds))
    rates.put(load.texts / load.seconds)


def measure(
    server: RunningServer, questions: list[Request], lists: list[bytes], rate: float, seconds: float
) -> list[str]:
    """Return a line of the table per load."""
    processes = multiprocessing.get_context("spawn")
    table = []
    alone_ms = 0.0
    for name, headers in LOADS.items():
        rates, filler = processes.Queue(), None
        if headers is not None:
            arguments = (server.url, lists, headers, seconds + 2 * AHEAD_S, rates)
            filler = processes.Process(target=fill, args=arguments)
            filler.start()
            time.sleep(2 * AHEAD_S)
        load = uvloop.run(open_loop(server.url, questions, poisson(rate, seconds)))
        texts_per_s = 0.0
        if filler is not None:
            texts_per_s = rates.get(timeout=120)
            filler.join()
        p50, p99 = (load.latencies.get_value_at_percentile(p) / 1e3 for p in (50, 99))
        alone_ms = alone_ms or p99
        table.append(
            f"| {rate:.0f} | {name} | {load.requests} | {dict(load.statuses)} | {p50:.1f} "
            f"| {p99:.1f} | {p99 / alone_ms:.2f} | {texts_per_s:.0f} |"
        )
    return table


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", nargs="?", default="cloze-bert")
    parser.add_argument("--store", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2, 0.5])
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    bundle = Store(options.store).open(options.bundle)
    command = (sys.executable, "-m", "cloze", "serve", "--port", "{port}")
    model = ("--model", options.bundle, "--model-store", str(options.store))
    subject = MeasuredServer("Cloze", (*command, *model), "/embed", "/healthz")
    words, rng = words_of(bundle), np.random.default_rng(0)
    questions = [
        Request(post("/embed", orjson.dumps({"inputs": text})))
        for text in make_texts(words, 2000, "questions").texts
    ]
    passages = [" ".join(rng.choice(words, 95)) for _ in range(320)]
    lists = [orjson.dumps({"inputs": passages[i : i + 32]}) for i in range(0, 320, 32)]
    with subject.start() as server:
        uvloop.run(closed_loop(server.url, questions, clients=8, seconds=2))
        closed = uvloop.run(closed_loop(server.url, questions, clients=8, seconds=5))
        capacity = closed.requests / closed.seconds
        print(
            f"{bundle.manifest.reference}: {capacity:.0f} questions/s of 8 clients in a closed "
            "loop\n\n| questions/s | beside | answered | statuses | p50 ms | p99 ms "
            "| p99 to alone | texts/s of lists |\n|---|---|---|---|---|---|---|---|",
            flush=True,
        )
        for share in options.shares:
            table = measure(server, questions, lists, share * capacity, options.seconds)
            print("\n".join(table), flush=True)


if __name__ == "__main__":
    main()
