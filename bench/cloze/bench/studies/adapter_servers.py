"""Servers with 1, 10 and 100 adapters beside the plain server, and beside another server.

    python bench/studies/adapter_servers.py WORK [--size minilm] [--layers all] [--precision int8]
    python bench/studies/adapter_servers.py WORK --tei BINARY    # 4 processes of another server too
    python bench/studies/adapter_servers.py WORK --many 1000     # the start, first uses, evictions

Weights and adapters of rank 8 are random, and texts are as long as search questions. They are
written to WORK first, unless an earlier run did that; ``--prepare`` does no more. Subjects take
turns; the table has medians of the turns, and the processor time of the server per text.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import numpy as np
import orjson
from safetensors.numpy import save_file

from cloze.bench.http_client import Connection, Request, post
from cloze.bench.load import closed_loop
from cloze.bench.peers import tei
from cloze.bench.peers.peer import PeerModel
from cloze.bench.peers.plain_onnx import write as write_plain
from cloze.bench.processes import RunningServer, process_tree
from cloze.bench.servers import MeasuredServer
from cloze.bench.sizes import SIZES, random_checkpoint
from cloze.bench.texts import make_texts, words_of
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Bundle, Store
from cloze.model_store.adapter_section import AdapterSupport
from cloze.model_store.manifest import Precision
from cloze.model_store.peft import CONFIG_FILE, NAME_PREFIX, TENSORS_FILE

BERT = replace(SIZES["bert-base"], max_positions=128)  # enough here, and quick to export
MODELS = {
    "minilm": replace(BERT, layers=6, hidden_size=384, intermediate_size=1536),
    "bert-base": BERT,
    "tiny": SIZES["tiny"],
}
LAYERS = {"qv": ("query", "value"), "all": ("all-linear",)}
COUNTS, RANK, CLIENTS, TEXTS, PEERS = (1, 10, 100), 8, 16, 1000, 4


@dataclass(slots=True)
class Subject:
    """Requests to a server, and what their turns gave."""

    name: str
    server: RunningServer
    requests: Sequence[Request]
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    lone_ms: list[float] = field(default_factory=list)


def write_adapter(folder: Path, support: AdapterSupport, seed: int) -> int:
    """Write an adapter with random matrices in PEFT's layout; return their bytes."""
    rng = np.random.default_rng(seed)
    prefix, tensors = NAME_PREFIX + next(iter(support.prefixes), ""), {}
    for name, layer in support.layers.items():
        for side, width in (("A", layer.inputs), ("B", layer.outputs * len(layer.numbers))):
            shape = (RANK, width) if side == "A" else (width, RANK)
            drawn = rng.normal(0, 0.02, shape).astype(np.float32)
            tensors[f"{prefix}{name}.lora_{side}.weight"] = drawn
    folder.mkdir(parents=True)
    save_file(tensors, folder / TENSORS_FILE)
    config = {"peft_type": "LORA", "task_type": "FEATURE_EXTRACTION", "r": RANK, "lora_alpha": RANK}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


def prepare(arguments: argparse.Namespace) -> tuple[Bundle, Path]:
    """Return the base and the folder of its adapters; write them if they are missing."""
    work, name = arguments.work, f"{arguments.size}-{arguments.layers}"
    checkpoint, store = work / arguments.size, Store(work / "store")
    if not checkpoint.exists():
        random_checkpoint(MODELS[arguments.size], checkpoint)
        write_plain(checkpoint)
    if not (work / "store" / name).exists():
        options = ExportOptions(
            tasks=("embed",), precisions=(Precision.INT8,), adapters=LAYERS[arguments.layers]
        )
        export(str(checkpoint), name, store, options)
    bundle = store.open(name)
    assert bundle.manifest.adapters is not None
    folder = work / f"{name}-adapters-{arguments.many or max(COUNTS)}"
    for number in range(arguments.many or max(COUNTS)):
        if not (one := folder / f"a{number}").exists():
            write_adapter(one, bundle.manifest.adapters, number)
    return bundle, folder


def server(
    bundle: Bundle, arguments: argparse.Namespace, *options: str, **environment: str
) -> MeasuredServer:
    """Return our server on a base."""
    command = (sys.executable, "-m", "cloze", "serve", "--port", "{port}", "--device", "cpu")
    model = ("--model-store", str(arguments.work / "store"), "--model", bundle.manifest.name)
    fixed = (*model, "--precision", arguments.precision)
    return MeasuredServer(
        "Cloze", (*command, *fixed, *options), "/embed", "/readyz", environment=environment
    )


def memory_mb(running: RunningServer) -> float:
    """Return the memory of a server in MB. A page that two sessions map counts once ("PSS")."""
    lines = [
        line
        for pid in process_tree(running.pid)
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    ]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def traffic(texts: Sequence[str], adapters: int, *, zipf: bool = False) -> list[Request]:
    """Return one request per text, each to one of so many adapters; 0: to the base."""
    shares = 1 / np.arange(1, adapters + 1) ** (1.0 if zipf else 0.0)
    rng = np.random.default_rng(adapters)
    chosen = rng.choice(adapters, len(texts), p=shares / shares.sum()) if adapters else None
    bodies: list[dict[str, str]] = [{"inputs": text} for text in texts]
    if chosen is not None:
        bodies = [
            body | {"model": f"a{number}"}
            for body, number in zip(bodies, chosen.tolist(), strict=True)
        ]
    return [Request(post("/embed", orjson.dumps(body))) for body in bodies]


async def first_uses(running: RunningServer, numbers: Sequence[int]) -> list[float]:
    """Ask each of these adapters alone, and return the milliseconds of each request."""
    spent, connection = [], await Connection.connect(running.url)
    for number in numbers:
        body = orjson.dumps({"inputs": "aaaa aaab aaac", "model": f"a{number}"})
        begin = time.perf_counter()
        response = await connection.send(post("/embed", body))
        spent.append(1000 * (time.perf_counter() - begin))
        assert response.status == 200, response.body
    await connection.close()
    return spent


async def take_turn(subject: Subject, seconds: float) -> None:
    """Load the server of a subject, and then ask it alone."""
    cpu_s = subject.server.cpu_s()
    load = await closed_loop(subject.server.url, subject.requests, clients=CLIENTS, seconds=seconds)
    assert set(load.statuses) == {200}, load.statuses
    subject.rates.append(load.requests / load.seconds)
    subject.cpu_ms.append(1000 * (subject.server.cpu_s() - cpu_s) / load.requests)
    lone = await closed_loop(subject.server.url, subject.requests, clients=1, seconds=seconds / 2)
    subject.lone_ms.append(lone.latencies.get_value_at_percentile(50) / 1000)


def print_turns(subjects: Sequence[Subject]) -> None:
    """Print the medians of the turns, and their ratios to the first subject."""
    print("\n| traffic | texts/s | of plain | server ms/text | lone ms | of plain |")
    print("|---|---|---|---|---|---|")
    plain = subjects[0]
    for one in subjects:
        rate = statistics.median(a / b for a, b in zip(one.rates, plain.rates, strict=True))
        lone = statistics.median(a / b for a, b in zip(one.lone_ms, plain.lone_ms, strict=True))
        medians = [statistics.median(values) for values in (one.rates, one.cpu_ms, one.lone_ms)]
        print(
            f"| {one.name} | {medians[0]:.0f} | {rate:.2f} | {medians[1]:.2f} "
            f"| {medians[2]:.2f} | {lone:.2f} |"
        )


async def add_under_load(
    running: RunningServer, requests: Sequence[Request], folder: Path, new: str
) -> None:
    """Serve one adapter more while clients ask, and print how long that takes."""
    load = asyncio.create_task(closed_loop(running.url, requests, clients=CLIENTS, seconds=4))
    await asyncio.sleep(1)
    await asyncio.to_thread(shutil.copytree, folder / "a0", folder / new)
    try:
        begin = time.perf_counter()
        os.kill(running.pid, signal.SIGHUP)
        async with httpx.AsyncClient(base_url=running.url) as client:
            while f'"{new}@1"' not in (await client.get("/v1/models")).text:
                await asyncio.sleep(0.02)
        added = time.perf_counter() - begin
        (first,) = await first_uses(running, [int(new[1:])])
        result = await load
    finally:
        shutil.rmtree(folder / new)
    print(f"\nadded under load after {added:.2f} s; its first answer took {first:.0f} ms more")
    print(f"answers of the load by status: {dict(result.statuses)}; 0 is a lost one")


def measure(bundle: Bundle, folder: Path, arguments: argparse.Namespace) -> None:
    """Measure memory, throughput, latency and an addition."""
    size = adapter_size(folder)
    texts = make_texts(words_of(bundle), TEXTS, "questions").texts
    with ExitStack() as stack:
        plain = stack.enter_context(server(bundle, arguments).start())
        adapted = stack.enter_context(server(bundle, arguments, "--adapter", str(folder)).start())
        subjects = [
            Subject("plain server", plain, traffic(texts, 0)),
            Subject("no adapter, of 100", adapted, traffic(texts, 0)),
        ]
        for one in subjects:
            asyncio.run(take_turn(one, 2 * arguments.seconds))
            one.rates, one.cpu_ms, one.lone_ms = [], [], []
        base = memory_mb(plain)
        print(f"plain server {base:.0f} MB; with adapters, none used: {memory_mb(adapted):.0f} MB")
        print(f"\n| adapters of {size / 1e6:.2f} MB in use | MB beyond plain | of their bytes |")
        print("|---|---|---|")
        first: list[float] = []
        for count in COUNTS:
            first += asyncio.run(first_uses(adapted, range(len(first), count)))
            requests = traffic(texts, count)
            subjects.append(Subject(f"{count}, uniform", adapted, requests))
            asyncio.run(closed_loop(adapted.url, requests, clients=CLIENTS, seconds=1))
            more = memory_mb(adapted) - base
            print(f"| {count} | {more:.1f} | {1e6 * more / (count * size):.2f} |")
        again = asyncio.run(first_uses(adapted, range(max(COUNTS))))
        medians = [statistics.median(spent) for spent in (first, again)]
        print(f"\nfirst use of an adapter {medians[0]:.1f} ms, later {medians[1]:.1f} ms")
        zipf = traffic(texts, max(COUNTS), zipf=True)
        subjects.append(Subject(f"{max(COUNTS)}, Zipf", adapted, zipf))
        if arguments.tei:
            subjects.append(Subject(f"{PEERS}, uniform", adapted, traffic(texts, PEERS)))
        for _ in range(arguments.turns):
            for one in subjects:
                asyncio.run(take_turn(one, arguments.seconds))
        print_turns(subjects)
        asyncio.run(add_under_load(adapted, zipf, folder, f"a{max(COUNTS)}"))
        if arguments.tei:
            ours = (memory_mb(adapted), statistics.median(subjects[-1].rates))
            print(f"\nours with {PEERS} adapters in use: {ours[1]:.0f} texts/s, {ours[0]:.0f} MB")
    if arguments.tei:
        asyncio.run(measure_peers(arguments, texts))


def adapter_size(folder: Path) -> int:
    """Return the bytes of one adapter's numbers."""
    data = (folder / "a0" / TENSORS_FILE).read_bytes()
    return len(data) - 8 - int.from_bytes(data[:8], "little")


async def measure_peers(arguments: argparse.Namespace, texts: Sequence[str]) -> None:
    """Run one process of another server per adapter, on the base's weights."""
    checkpoint = (arguments.work / arguments.size).resolve()
    (peer,) = tei.PEER.servers(arguments.tei, PeerModel(checkpoint, "embed"))
    requests, memory = traffic(texts, 0), []
    with ExitStack() as stack:
        running = [stack.enter_context(peer.start()) for _ in range(PEERS)]
        for seconds in [2.0] + [arguments.seconds] * arguments.turns:
            loads = await asyncio.gather(
                *(
                    closed_loop(one.url, requests, clients=CLIENTS // PEERS, seconds=seconds)
                    for one in running
                )
            )
            memory.append(sum(load.requests for load in loads) / seconds)
        each = [memory_mb(one) for one in running]
    print(
        f"{PEERS} processes of {peer.name}: {statistics.median(memory[1:]):.0f} texts/s, "
        f"{sum(each):.0f} MB; {max(COUNTS)} would have {max(COUNTS) * statistics.mean(each):.0f} MB"
    )


def measure_many(bundle: Bundle, folder: Path, arguments: argparse.Namespace) -> None:
    """Measure the start with many adapters, their first uses, and evictions."""
    size, many = adapter_size(folder), arguments.many
    texts = make_texts(words_of(bundle), TEXTS, "questions").texts
    with server(bundle, arguments).start() as plain:
        print(f"plain server: ready after {plain.ready_s:.2f} s, {memory_mb(plain):.0f} MB")
    tenth = max(1, round(many * size / 10 / 2**20))
    print("\n| memory of adapters | ready s | MB at the start | first use ms | texts/s | MB |")
    print("|---|---|---|---|---|---|")
    for limit in (round(1.1 * many * size / 2**20), tenth):
        options = ("--adapter", str(folder), "--adapter-memory-mb", str(limit))
        with server(bundle, arguments, *options).start() as running:
            start = memory_mb(running)
            first = statistics.median(asyncio.run(first_uses(running, range(0, many, 10))))
            asyncio.run(closed_loop(running.url, traffic(texts, many), clients=CLIENTS, seconds=5))
            subject = Subject("", running, traffic(texts, many))
            for _ in range(arguments.turns):
                asyncio.run(take_turn(subject, arguments.seconds))
            rate = statistics.median(subject.rates)
            print(
                f"| {limit} MiB | {running.ready_s:.2f} | {start:.0f} | {first:.1f} | {rate:.0f} "
                f"| {memory_mb(running):.0f} |"
            )


def main() -> None:
    """Prepare, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--size", choices=MODELS, default="minilm")
    parser.add_argument("--layers", choices=LAYERS, default="qv")
    parser.add_argument("--precision", choices=["fp32", "int8"], default="fp32")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--many", type=int, default=0)
    parser.add_argument("--tei", help="the program text-embeddings-inference")
    parser.add_argument("--prepare", action="store_true")
    arguments = parser.parse_args()
    bundle, folder = prepare(arguments)
    if arguments.prepare:
        return
    print(f"\n## {arguments.size}, {arguments.layers}, {arguments.precision}\n", flush=True)
    (measure_many if arguments.many else measure)(bundle, folder, arguments)


if __name__ == "__main__":
    main()
