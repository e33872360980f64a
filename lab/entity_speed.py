"""Measures entities of any label beside the library gliner, over HTTP, on the same checkpoint.

    python -m lab.entity_speed CHECKPOINT STORE NAME PYTHON TEXTS --words 20,100 --threshold 0.9

CHECKPOINT is a folder of gliner, and NAME its bundle in STORE with an int8 graph. PYTHON is an
interpreter with gliner, fastapi and uvicorn. TEXTS is a file of JSON lines with tokens. The server
of gliner takes up to 16 requests that wait as one batch of the library. Prints one row per load:
requests per second of each server with the server's processor time per request in ms, then the
ratios of the rates to the best of the library's servers.
"""

import asyncio
import itertools
import json
import lzma
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import click
import orjson

import cloze.bench
from cloze.bench.http_client import Connection, post
from cloze.bench.machine import describe_machine, processor_time, stolen_share
from cloze.bench.processes import RunningServer
from cloze.bench.servers import MeasuredServer
from cloze.bench.subjects import MeasuredModel, cloze_server
from cloze.model_store.manifest import Precision
from cloze.service.tasks.entities import TASK

LABELS = (
    "person, organization, location, date, product, event, animal, number, nationality, award, "
    "song, book, film, political party, scientist, university, disease, chemical, language, "
    "musical instrument, programming language, currency, sports team, military rank, building"
)
TEXTS = 64
TURNS = 2

APP = Path(cloze.bench.__path__[0]) / "apps" / "gliner_app.py"
LIBRARY = {
    "torch": "gliner, torch",
    "onnx": "gliner, ONNX",
    "onnx-int8": "gliner, ONNX int8",
    "torch-int8": "gliner, torch int8",
}


class Figures(NamedTuple):
    """Requests per second until the last answer, and processor time of the server per request."""

    rate: float
    cpu_ms: float


class Load(NamedTuple):
    """What the clients send, and how many they are."""

    words: int
    labels: int
    clients: int


def cut_texts(file: Path, words: int) -> list[str]:
    """Return texts of so many tokens of the file, each from another place."""
    opened = lzma.open if file.suffix == ".xz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        tokens = [token for line in lines for token in json.loads(line)["tokens"]]
    tokens = [token for token in tokens if token.isalnum()]
    starts = range(0, len(tokens) - words, (len(tokens) - words) // TEXTS)
    return [" ".join(tokens[start : start + words]) for start in starts][:TEXTS]


def bodies(texts: Sequence[str], labels: int, threshold: float) -> list[bytes]:
    """Return a request per text."""
    parameters = {"labels": LABELS.split(", ")[:labels], "threshold": threshold}
    return [
        post(TASK.route, orjson.dumps({"inputs": text, "parameters": parameters})) for text in texts
    ]


async def send_all(
    server: RunningServer, requests: Sequence[bytes], clients: int, seconds: float
) -> Figures:
    """Send requests for some time, and wait for the last answer."""
    numbers, answered = itertools.count(), 0
    started, cpu_s = time.perf_counter(), server.cpu_s()

    async def client() -> None:
        nonlocal answered
        connection = await Connection.connect(server.url)
        while time.perf_counter() - started < seconds:
            response = await connection.send(requests[next(numbers) % len(requests)])
            if response.status != 200:
                raise click.ClickException(response.body.decode())
            answered += 1
        await connection.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
    passed = time.perf_counter() - started
    return Figures(answered / passed, (server.cpu_s() - cpu_s) / answered * 1000)


def measure(
    servers: Mapping[str, RunningServer], load: Load, sent: Sequence[bytes], seconds: float
) -> dict[str, Figures]:
    """Return the medians of each server's turns; the servers take turns, after a first for each."""
    turns: dict[str, list[Figures]] = {name: [] for name in servers}
    # A batch of the slowest server takes longer than all turns of one client.
    for _, name in itertools.product(range(1 + TURNS if load.clients == 1 else 1), servers):
        figures = asyncio.run(send_all(servers[name], sent, load.clients, seconds))
        turns[name].append(figures)
    return {
        name: Figures(*map(statistics.median, zip(*all_[-TURNS:], strict=True)))
        for name, all_ in turns.items()
    }


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("name")
@click.argument("python")
@click.argument("texts", type=click.Path(path_type=Path))
@click.option("--words", default="20,100,300")
@click.option("--labels", default="5,25")
@click.option("--clients", default="1,16")
@click.option("--backends", default=",".join(LIBRARY))
@click.option("--threshold", default=0.5)
@click.option("--seconds", default=3.0)
def main(
    checkpoint: Path,
    store: Path,
    name: str,
    python: str,
    texts: Path,
    words: str,
    labels: str,
    clients: str,
    backends: str,
    threshold: float,
    seconds: float,
) -> None:
    """Measure all servers in turn."""
    servers = [
        cloze_server(f"Cloze {precision}", MeasuredModel(name, store, TASK, precision))
        for precision in (Precision.FP32, Precision.INT8)
    ]
    servers += [
        MeasuredServer(
            LIBRARY[backend],
            (python, str(APP), str(checkpoint), backend, "{port}"),
            TASK.route,
            "/healthz",
        )
        for backend in backends.split(",")
    ]
    loads = [
        Load(*map(int, one))
        for one in itertools.product(words.split(","), labels.split(","), clients.split(","))
    ]
    requests = {one: bodies(cut_texts(texts, one.words), one.labels, threshold) for one in loads}
    before = processor_time()
    print("| words, labels, clients |", " | ".join(one.name for one in servers), "| fp32 | int8 |")
    with ExitStack() as stack:
        running = {one.name: stack.enter_context(one.start()) for one in servers}
        for load in loads:
            results = list(measure(running, load, requests[load], seconds).values())
            cells = " | ".join(f"{one.rate:.3g} ({one.cpu_ms:.3g})" for one in results)
            best = max(one.rate for one in results[2:])
            ratios = " | ".join(f"{ours.rate / best:.2f}" for ours in results[:2])
            print(f"| {', '.join(map(str, load))} | {cells} | {ratios} |", flush=True)
        print("MB", {name: round(server.pss_mb()) for name, server in running.items()})
    machine, stolen = describe_machine(2), stolen_share(before, processor_time())
    print(f"{machine['processor']} ({machine['instructions']}), {stolen:.0%} stolen")


if __name__ == "__main__":
    main()
