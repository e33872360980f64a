"""Measures entities of any label beside the library gliner, over HTTP, on the same checkpoint.

    python -m lab.entity_speed CHECKPOINT STORE NAME PYTHON TEXTS --words 20,100 --threshold 0.9

CHECKPOINT is a folder of gliner, and NAME its bundle in STORE with an int8 graph. PYTHON is an
interpreter with gliner, fastapi and uvicorn. TEXTS is a file of JSON lines with tokens. The server
of gliner takes up to 16 requests that wait as one batch of the library. Prints one row per load:
requests per second of each server, then the ratios to the best of the library's servers.
"""

import asyncio
import itertools
import json
import lzma
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import click
import orjson

import cloze.bench
from cloze.bench.http_client import Connection, post
from cloze.bench.machine import describe_machine, processor_time, stolen_share
from cloze.bench.servers import MeasuredServer
from cloze.bench.subjects import MeasuredModel, cloze_server
from cloze.service.tasks.entities import TASK

LABELS = (
    "person, organization, location, date, product, event, animal, number, nationality, award, "
    "song, book, film, political party, scientist, university, disease, chemical, language, "
    "musical instrument, programming language, currency, sports team, military rank, building"
)
TEXTS = 64
TURNS = 2

APP = Path(cloze.bench.__path__[0]) / "apps" / "gliner_app.py"
LIBRARY = {"torch": "gliner, torch", "onnx": "gliner, ONNX", "onnx-int8": "gliner, ONNX int8"}


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


async def rate(url: str, requests: Sequence[bytes], clients: int, seconds: float) -> float:
    """Return requests per second from the start until the last answer to requests of that time."""
    numbers, answered = itertools.count(), 0
    started = time.perf_counter()

    async def client() -> None:
        nonlocal answered
        connection = await Connection.connect(url)
        while time.perf_counter() - started < seconds:
            response = await connection.send(requests[next(numbers) % len(requests)])
            if response.status != 200:
                raise click.ClickException(response.body.decode())
            answered += 1
        await connection.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
    return answered / (time.perf_counter() - started)


async def entities(url: str, request: bytes) -> list[list[object]]:
    """Return the places and labels that a server finds."""
    connection = await Connection.connect(url)
    found = orjson.loads((await connection.send(request)).body)
    await connection.close()
    return [[one["start"], one["end"], one["label"]] for one in found]


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
    """Measure all servers, one after the other."""
    servers = [
        cloze_server(f"Cloze {precision}", MeasuredModel(name, store, TASK, precision))
        for precision in ("fp32", "int8")
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
        tuple(map(int, one))
        for one in itertools.product(words.split(","), labels.split(","), clients.split(","))
    ]
    requests = {load: bodies(cut_texts(texts, load[0]), load[1], threshold) for load in loads}
    rates: dict[tuple[str, tuple[int, ...]], list[float]] = {}
    answers: dict[str, list[object]] = {}
    before = processor_time()
    for server in servers:
        with server.start() as running:
            answers[server.name] = [
                asyncio.run(entities(running.url, requests[load][0])) for load in loads
            ]
            for load in loads:
                asyncio.run(rate(running.url, requests[load], load[2], seconds / 3))
            for _, load in itertools.product(range(TURNS), loads):
                figure = asyncio.run(rate(running.url, requests[load], load[2], seconds))
                rates.setdefault((server.name, load), []).append(figure)
            print(f"{server.name}: {running.pss_mb():.0f} MB", flush=True)
    machine = describe_machine(2)
    stolen = stolen_share(before, processor_time())
    print(f"{machine['processor']} ({machine['instructions']}), {stolen:.0%} stolen")
    equal = [answers[servers[0].name] == answers[one.name] for one in servers[2:]]
    print(f"entities of the first texts equal to those of fp32: {equal}, {answers}"[:300])
    print("| words, labels, clients |", " | ".join(one.name for one in servers), "| fp32 | int8 |")
    for load in loads:
        figures = [statistics.median(rates[one.name, load]) for one in servers]
        best = max(figures[2:])
        ratios = f"{figures[0] / best:.2f} | {figures[1] / best:.2f}"
        row = " | ".join(f"{figure:.3g}" for figure in figures)
        print(f"| {', '.join(map(str, load))} | {row} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
