"""How long does an answer take after a pause, idle and beside a busy process, and in closed loops?

    python bench/studies/pauses.py BUNDLE FILE [--store DIR] [--precision int8] [--seconds 2]
        [--server before=/other/checkout/.venv/bin/cloze] [--server after=.venv/bin/cloze]

A client of one connection sends a question, waits for the answer, and sleeps. Each load is
measured with all servers in turns, in random order. The turn is appended to FILE, so that several
runs count together, and the table of the whole file is printed: medians over turns.
"""

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import uvloop

from cloze.bench.load import closed_loop
from cloze.bench.processes import RunningServer
from cloze.bench.servers import MeasuredServer
from cloze.bench.subjects import EngineAlone, MeasuredModel
from cloze.bench.texts import make_texts, words_of
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.model_store.manifest import Precision
from cloze.service.machine import available_cpus
from cloze.service.tasks.embed import TASK as EMBED

PAUSES = [(0.0, 150), (0.05, 40), (0.3, 10)]
"""Seconds of a pause, and number of requests."""

CLIENTS = (1, 8, 32)


def after_pauses(url: str, bodies: Sequence[bytes], pause_s: float, count: int) -> list[float]:
    """Return the milliseconds of each answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    times = []
    for number in range(count + 2):
        time.sleep(pause_s)
        start = time.perf_counter()
        connection.request("POST", "/embed", bodies[number % len(bodies)])
        response = connection.getresponse()
        response.read()
        times.append((time.perf_counter() - start) * 1e3)
        assert response.status == 200, response.status
    connection.close()
    return times[2:]


@contextmanager
def busy_neighbours() -> Iterator[None]:
    """Keep all cores but one busy."""
    endless = (sys.executable, "-c", "while True: pass")
    processes = [subprocess.Popen(endless) for _ in range(available_cpus() - 1)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure_pauses(server: RunningServer, texts: Sequence[str], label: str) -> dict[str, float]:
    """Return p50 and p90 in ms, one text or two per request, by load."""
    figures = {}
    for texts_each, loads in ((1, PAUSES), (2, PAUSES[1:2])):
        lists = [texts[n : n + texts_each] for n in range(0, len(texts), texts_each)]
        bodies = [orjson.dumps({"inputs": each}) for each in lists]
        for pause_s, count in loads:
            times = sorted(after_pauses(server.url, bodies, pause_s, count))
            name = f"{label}{texts_each} text{'s' * (texts_each > 1)}, {pause_s * 1000:.0f} ms"
            figures[f"{name}, p50"] = statistics.median(times)
            figures[f"{name}, p90"] = times[int(0.9 * len(times))]
    return figures


def measure(
    servers: Sequence[MeasuredServer], texts: Sequence[str], seconds: float
) -> dict[str, dict[str, float]]:
    """Return the figures of one turn, by server."""
    figures: dict[str, dict[str, float]] = defaultdict(dict)
    with ExitStack() as stack:
        running = [(server, stack.enter_context(server.start())) for server in servers]
        for _, one in running:  # the first requests are slow
            after_pauses(one.url, [orjson.dumps({"inputs": texts[0]})], 0.0, 50)
        for clients in CLIENTS:
            for server, one in random.sample(running, len(running)):
                requests = server.requests(texts, each=1)
                load = closed_loop(one.url, requests, clients=clients, seconds=seconds)
                figures[server.name][f"{clients} in a loop, answers/s"] = (
                    uvloop.run(load).requests / seconds
                )
        for server, one in random.sample(running, len(running)):
            figures[server.name] |= measure_pauses(one, texts, "")
        with busy_neighbours():
            for server, one in random.sample(running, len(running)):
                figures[server.name] |= measure_pauses(one, texts, "busy: ")
    return figures


def table(file: Path) -> str:
    """Return the medians of all turns in a file."""
    turns: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for line in file.read_text().splitlines():
        turn = json.loads(line)
        turns[turn["precision"], turn["server"]].append(turn["figures"])
    names = list(dict.fromkeys(name for each in turns.values() for name in each[-1]))
    lines = [" | ".join(("", "", *(" ".join(key) for key in turns), "")).strip()]
    lines.append("|---" * (len(turns) + 1) + "|")
    for name in names:
        values = [[turn[name] for turn in each if name in turn] for each in turns.values()]
        medians = [f"{statistics.median(each):.2f}" if each else "" for each in values]
        lines.append(" | ".join(("", name, *medians, "")).strip())
    return "\n".join(lines)


def main() -> None:
    """Measure one turn, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle")
    parser.add_argument("file", type=Path)
    parser.add_argument("--store", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND")
    options = parser.parse_args()
    texts = make_texts(words_of(Store(options.store).open(options.bundle)), 400, "questions").texts
    model = MeasuredModel(options.bundle, options.store, EMBED, Precision(options.precision))
    alone = EngineAlone(model, texts).single_latencies(options.seconds)
    turn = {"graph": {"1 text, 0 ms, p50": alone.get_value_at_percentile(50) / 1000}}
    arguments = ("serve", "--port", "{port}", "--model", options.bundle, "--model-store")
    servers = [
        MeasuredServer(
            name,
            (command, *arguments, str(options.store), "--precision", options.precision),
            "/embed",
            "/readyz",
        )
        for name, command in (server.split("=", 1) for server in options.server)
    ]
    turn |= measure(servers, texts, options.seconds)
    with options.file.open("a") as file:
        for name, figures in turn.items():
            line = {"precision": options.precision, "server": name, "figures": figures}
            file.write(json.dumps(line) + "\n")
    print(table(options.file))


if __name__ == "__main__":
    main()
