"""Does a polite key get its answers beside a greedy one?

    python bench/studies/polite.py [--times 5] [--seconds 30]

The greedy key offers a multiple of the server's capacity in an open loop: questions, and a fifth of
that number of lists of 32 passages. The polite key sends a question about every 0.3 s.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import uvloop

from cloze.bench.http_client import Request, post
from cloze.bench.load import (
    MANY_CONNECTIONS,
    allow_many_connections,
    closed_loop,
    open_loop,
    poisson,
)
from cloze.bench.servers import MeasuredServer
from cloze.bench.studies.mix import CLIENTS, bodies
from cloze.bench.texts import words_of
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT

EVERY_S = 0.3


def make_key(file: Path, name: str) -> dict[str, str]:
    """Add a key to a keys file, and return the header that sends it."""
    command = (sys.executable, "-m", "cloze", "keys", "add", name, "--file", str(file))
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {"authorization": f"Bearer {printed.split()[-1]}"}


async def measure(
    server: MeasuredServer, polite: Sequence[Request], greedy: Sequence[Request], times: float
) -> None:
    """Measure, and print a line per key."""
    seconds = len(polite) * EVERY_S
    with server.start() as running:
        closed = await closed_loop(running.url, greedy, clients=CLIENTS, seconds=5)
        capacity = closed.requests / closed.seconds
        arrivals = poisson(times * capacity, seconds)
        steadily = EVERY_S * np.arange(len(polite), dtype=np.float64)
        loads = await asyncio.gather(
            open_loop(running.url, polite, steadily, connections=CLIENTS),
            open_loop(running.url, greedy, arrivals, connections=MANY_CONNECTIONS),
        )
    print(f"capacity {capacity:.0f} requests per second")
    for name, load in zip(("polite", "greedy"), loads, strict=True):
        p50, most = (load.latencies.get_value_at_percentile(p) / 1e6 for p in (50, 100))
        print(f"{name}: {dict(load.statuses)}, p50 {p50:.2f} s, slowest {most:.2f} s")


def main() -> None:
    """Measure, and print what became of the requests of both keys."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    allow_many_connections()
    bundle = Store(DEFAULT_ROOT).open("cloze-bert")
    made = bodies(words_of(bundle), bundle.manifest.tokenizer.mask_token or "")
    questions, lists = made["question"], made["list of 32"]
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        headers = {name: make_key(keys, name) for name in ("greedy", "polite")}
        sent = [*questions, *(lists * (len(questions) // 5 // len(lists)))]
        greedy = [Request(post(*each, headers["greedy"])) for each in sent]
        count = round(options.seconds / EVERY_S)
        polite = [
            Request(post(*questions[n % len(questions)], headers["polite"])) for n in range(count)
        ]
        command = (sys.executable, "-m", "cloze", "serve", "--port", "{port}")
        server = MeasuredServer(
            "Cloze", command, "/embed", "/healthz", environment={"CLOZE_KEYS_FILE": os.fspath(keys)}
        )
        uvloop.run(measure(server, polite, greedy, options.times))


if __name__ == "__main__":
    main()
