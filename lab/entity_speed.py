"""Measures entities of any label beside the library gliner, over HTTP, on the same checkpoint.

    python -m lab.entity_speed CHECKPOINT STORE NAME PYTHON TEXTS --words 20,100 --threshold 0.9

CHECKPOINT is a folder of gliner, and NAME its bundle in STORE with an int8 graph. PYTHON is an
interpreter with gliner, fastapi and uvicorn. TEXTS is a file of JSON lines with tokens. The server
of gliner takes up to 16 requests that wait as one batch of the library. Prints one row per load:
requests per second of each server with the server's processor time per request in ms, then the
ratios of the rates to the best of the library's servers.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

import cloze.bench
from cloze.bench.http_client import Request
from cloze.bench.load import open_loop
from cloze.bench.machine import describe_machine, stolen_share
from cloze.bench.processes import MeasuredServer, RunningServer
from cloze.bench.subjects import MeasuredModel, cloze_server
from cloze.bench.texts import read_lines
from cloze.model_store.manifest import Precision
from cloze.service.server.startup import run_loop
from cloze.service.tasks.entities import TASK

LABELS = (
    "person, organization, location, date, product, event, animal, number, nationality, award, "
    "song, book, film, political party, scientist, university, disease, chemical, language, "
    "musical instrument, programming language, currency, sports team, military rank, building"
)
TEXTS = 64

APP = Path(cloze.bench.__path__[0]) / "apps" / "gliner_app.py"
BACKENDS = ("torch", "onnx", "onnx-int8", "torch-int8")


class Figures(NamedTuple):
    """Requests per second until the last answer, and processor time of the server per request."""

    rate: float
    cpu_ms: float


def cut_texts(file: Path, words: int) -> list[str]:
    """Return texts of so many tokens of the file, each from another place."""
    every = (token for line in read_lines(file) for token in json.loads(line)["tokens"])
    tokens = [token for token in every if token.isalnum()]
    starts = range(0, len(tokens) - words, (len(tokens) - words) // TEXTS)
    return [" ".join(tokens[start : start + words]) for start in starts][:TEXTS]


def measure(
    server: RunningServer, requests: Sequence[Request], clients: int, seconds: float
) -> Figures:
    """Let the clients send a request each, and then as many as take about so many seconds.

    The number of requests is fixed, because a batch of a slow server may take longer than the time.
    """
    count = clients
    for _ in range(2):
        cpu_s = server.cpu_s()
        load = run_loop(open_loop(server.url, requests, np.zeros(count), connections=clients))
        if load.requests < count:
            raise click.ClickException(f"{server.url} answered {dict(load.statuses)}")
        rate = load.requests / load.seconds
        figures = Figures(rate, (server.cpu_s() - cpu_s) / count * 1000)
        count = max(clients, round(rate * seconds))
    return figures


def servers_of(
    checkpoint: Path, store: Path, name: str, python: str, backends: Sequence[str]
) -> Iterator[MeasuredServer]:
    """Yield our servers in both precisions, then the library's."""
    for precision in (Precision.FP32, Precision.INT8):
        yield cloze_server(f"Cloze {precision}", MeasuredModel(name, store, TASK, precision))
    for backend in backends:
        command = (python, str(APP), str(checkpoint), backend, "{port}")
        yield MeasuredServer(f"gliner, {backend}", command, TASK.route, "/healthz")


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("store", type=click.Path(path_type=Path))
@click.argument("name")
@click.argument("python")
@click.argument("texts", type=click.Path(path_type=Path))
@click.option("--words", default="20,100,300")
@click.option("--labels", default="5,25")
@click.option("--clients", default="1,16")
@click.option("--backends", default=",".join(BACKENDS))
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
    servers = list(servers_of(checkpoint, store, name, python, backends.split(",")))
    stolen_share()
    print("| words, labels, clients |", " | ".join(one.name for one in servers), "| fp32 | int8 |")
    with ExitStack() as stack:
        running = {one.name: stack.enter_context(one.start()) for one in servers}
        for load in itertools.product(words.split(","), labels.split(","), clients.split(",")):
            length, number, senders = map(int, load)
            parameters = {"labels": LABELS.split(", ")[:number], "threshold": threshold}
            sender = replace(servers[0], extra={"parameters": parameters})
            sent = sender.requests(cut_texts(texts, length), each=1)
            results = [measure(one, sent, senders, seconds) for one in running.values()]
            cells = " | ".join(f"{one.rate:.3g} ({one.cpu_ms:.3g})" for one in results)
            best = max(one.rate for one in results[2:])
            ratios = " | ".join(f"{ours.rate / best:.2f}" for ours in results[:2])
            print(f"| {', '.join(load)} | {cells} | {ratios} |", flush=True)
        print("MB", {name: round(server.pss_mb()) for name, server in running.items()})
    machine, stolen = describe_machine(), stolen_share()
    print(f"{machine['processor']} ({machine['instructions']}), {stolen:.0%} stolen")


if __name__ == "__main__":
    main()
