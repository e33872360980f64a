"""Processor time of each thread of a server per request, and texts per batch.

python bench/studies/server_threads.py STORE MODEL PRECISION
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import httpx

from cloze.bench.http_client import Request
from cloze.bench.load import closed_loop
from cloze.bench.processes import RunningServer
from cloze.bench.subjects import MeasuredModel, cloze_server
from cloze.bench.texts import make_texts, words_of
from cloze.model_store import Store
from cloze.service.core import RequestedPrecision
from cloze.service.tasks import embed

_TICK_MS = 10.0
"""Milliseconds of a unit of ``/proc/PID/task/TID/stat``."""

_WARM_UP_S, _LOAD_S = 1.0, 6.0
_ROWS = 4


def _thread_ms(pid: int) -> dict[str, float]:
    """Return the processor time of each thread of a process in ms, by name and number."""
    times = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        user, system = (folder / "stat").read_text().rsplit(")", 1)[1].split()[11:13]
        name = "main thread" if folder.name == str(pid) else (folder / "comm").read_text().strip()
        times[f"{name}/{folder.name}"] = (int(user) + int(system)) * _TICK_MS
    return times


def _counter(metrics: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(name))


def _print_load(server: RunningServer, requests: Sequence[Request], clients: int) -> None:
    def state() -> tuple[dict[str, float], list[float]]:
        metrics = httpx.get(f"{server.url}/metrics").text
        counts = [_counter(metrics, f"cloze_batch_sequences_{part}") for part in ("sum", "count")]
        return _thread_ms(server.pid), counts

    asyncio.run(closed_loop(server.url, requests, clients=clients, seconds=_WARM_UP_S))
    before, counts_before = state()
    load = asyncio.run(closed_loop(server.url, requests, clients=clients, seconds=_LOAD_S))
    after, counts = state()
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    busiest = sorted(spent, key=spent.__getitem__, reverse=True)[:_ROWS]
    cells = [f"{name.split('/')[0]} {spent[name] / load.requests:.2f}" for name in busiest]
    sequences, batches = (new - old for new, old in zip(counts, counts_before, strict=True))
    rate = load.requests / _LOAD_S
    print(f"| {clients} | {rate:.0f} | {sequences / batches:.1f} | {', '.join(cells)} |")


def measure_threads(store: Path, model: str, precision: RequestedPrecision) -> None:
    """Print a table with a row per number of clients, who send made questions."""
    measured = cloze_server(model, MeasuredModel(model, store, embed.TASK, precision))
    texts = make_texts(words_of(Store(store).open(model)), 1500, "questions").texts
    requests = measured.single_requests(texts, [""] * len(texts))
    print("| clients | requests/s | texts per batch | ms of a core per request, by thread |")
    print("|---|---|---|---|")
    with measured.start() as server:
        for clients in (1, 32):
            _print_load(server, requests, clients)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    measure_threads(Path(sys.argv[1]), sys.argv[2], cast(RequestedPrecision, sys.argv[3]))
