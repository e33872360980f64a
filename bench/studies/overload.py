"""Goodput under an open-loop overload: answers in time, refusals, probes, memory.

python bench/studies/overload.py BUNDLE [--store DIR] [--texts questions] [--tei BINARY CHECKPOINT]
python bench/studies/overload.py  # all bundled models: embed, fill-mask, nsp and qa, mixed texts
python bench/studies/overload.py --stated-ms 2000  # each request states its time limit

In time is within 5 s, after which httpx gives up by default, or within the stated time limit.

A closed loop with 32 clients measures the capacity. Then an open loop offers five times as much.
The load generator and the server share the cores, so the processor time of the generator and of the
refusals is subtracted: the attainable rate is the capacity per second of processor time that the
generator leaves in the closed loop, and both leave in the overload. A second server, which refuses
almost every request, shows how long the event loop takes for a refusal.
"""

import argparse
import multiprocessing
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from hdrh.histogram import HdrHistogram

from cloze.bench.http_client import Request
from cloze.bench.load import (
    MANY_CONNECTIONS,
    LoadResult,
    allow_many_connections,
    closed_loop,
    histogram,
    open_loop,
    poisson,
)
from cloze.bench.processes import RunningServer
from cloze.bench.servers import MeasuredServer
from cloze.bench.soak.traffic import BAD, make_requests
from cloze.bench.texts import make_texts, words_of
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Event

GOOD_S = 5.0
"""After this time, httpx gives up by default."""

CLIENTS = 32
PROBE_EVERY_S = 0.1


@dataclass(slots=True)
class Watch:
    """What a bystander observes during a load: latencies of probes, and the server's memory."""

    probes: HdrHistogram = field(default_factory=histogram)
    failed_probes: int = 0
    rss_mb: list[float] = field(default_factory=list)


def probe(url: str, ended: "Event", results: "Queue[list[float | None]]") -> None:
    """Probe on new connections, and report the seconds of each probe; None: it failed.

    In a process of its own: in a thread, the load generator would delay the probes. It has a higher
    priority than the server if that is allowed, as if it ran on another machine.
    """
    with suppress(OSError):
        os.nice(-10)
    seconds: list[float | None] = []
    while not ended.wait(PROBE_EVERY_S):
        started = time.perf_counter()
        try:
            urllib.request.urlopen(url, timeout=10).read()
            seconds.append(time.perf_counter() - started)
        except (OSError, urllib.error.URLError):
            seconds.append(None)
    results.put(seconds)


@contextmanager
def watching(server: RunningServer, path: str) -> Iterator[Watch]:
    """Probe the server, and note its memory, until the context ends."""
    processes = multiprocessing.get_context("spawn")
    watch, ended, results = Watch(), processes.Event(), processes.Queue()
    prober = processes.Process(target=probe, args=(server.url + path, ended, results))
    prober.start()

    def run() -> None:
        while not ended.wait(0.5):
            watch.rss_mb.append(server.rss_mb())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()
        for seconds in results.get(timeout=30):
            watch.probes.record_value(max(1, round((seconds or 10.0) * 1e6)))
            watch.failed_probes += seconds is None
        prober.join()


def loop_s(server: RunningServer) -> float:
    """Return the processor time of a server's first thread, which has the event loop."""
    fields = Path(f"/proc/{server.pid}/task/{server.pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


async def refusal_s(subject: MeasuredServer, requests: Sequence[Request]) -> float:
    """Return the event loop's processor time of a refusal, apart from that of answers."""
    with subject.start() as server:
        before = loop_s(server)
        answered = await closed_loop(server.url, requests, clients=CLIENTS, seconds=3)
        answer_s = (loop_s(server) - before) / answered.requests
    refusing = replace(subject, environment={"CLOZE_MAX_QUEUE_WAIT_MS": "1"})
    with refusing.start() as server:
        before = loop_s(server)
        load = await closed_loop(server.url, requests, clients=8 * CLIENTS, seconds=3)
        seconds = loop_s(server) - before - load.requests * answer_s
    refused = load.statuses[429]  # none if the requests state their own limit
    return seconds / refused if refused else 0.0


async def measure(
    subject: MeasuredServer,
    requests: Sequence[Request],
    times: float,
    seconds: float,
    good_s: float,
) -> str:
    """Return a line of the table."""
    refusal = await refusal_s(subject, requests) if subject.name == "Cloze" else 0.0
    with subject.start() as server:
        await closed_loop(server.url, requests, clients=CLIENTS, seconds=2)
        closed = await closed_loop(server.url, requests, clients=CLIENTS, seconds=5)
        capacity = closed.requests / closed.seconds
        arrivals = poisson(times * capacity, seconds)
        cpu_s = server.cpu_s()
        before = server.rss_mb()
        with watching(server, subject.ready_path) as watch:
            load = await open_loop(server.url, requests, arrivals, connections=MANY_CONNECTIONS)
        cpu_s = server.cpu_s() - cpu_s
        after = await closed_loop(server.url, requests, clients=CLIENTS, seconds=3)
    good = _good(load, good_s) / load.seconds
    refused_s = refusal * load.statuses[429] / load.seconds
    attainable = capacity * (_left(load) - refused_s) / _left(closed)
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(load.statuses.items()))
    return (
        f"| {subject.name} ({refusal * 1e6:.0f} us per refusal) | {capacity:.0f} "
        f"| {len(arrivals) / seconds:.0f} | {good:.0f} "
        f"| {good / capacity:.2f} | {good / attainable:.2f} "
        f"| {_ms(load.latencies, 50)} / {_ms(load.latencies, 99)} | {statuses} "
        f"| {_ms(watch.probes, 50)} / {_ms(watch.probes, 99)}, {watch.failed_probes} failed "
        f"| {before:.0f} / {max(watch.rss_mb):.0f} | {cpu_s / load.seconds:.2f} "
        f"/ {load.client_cpu_s / load.seconds:.2f} | {after.requests / after.seconds:.0f} |"
    )


def _good(load: LoadResult, good_s: float) -> int:
    """Return the number of answers that came in time."""
    steps = load.latencies.get_recorded_iterator()
    return sum(
        step.count_added_in_this_iter_step
        for step in steps
        if step.value_iterated_to <= good_s * 1e6
    )


def _left(load: LoadResult) -> float:
    """Return the processor seconds per second that the generator leaves."""
    return len(os.sched_getaffinity(0)) - load.client_cpu_s / load.seconds


def _ms(latencies: HdrHistogram, percentile: float) -> str:
    return f"{latencies.get_value_at_percentile(percentile) / 1000:.0f}"


TABLE = """\
| server | capacity /s | offered /s | in time /s | of capacity | of attainable | p50 / p99 ms | \
statuses | probe p50 / p99 ms | memory MB before / most | cores of server / generator | after /s |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


def subjects_parser(precision: str = "auto") -> argparse.ArgumentParser:
    """Return a parser of the options that say which servers are measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", nargs="?", help="all bundled models without it")
    parser.add_argument("--store", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--precision", default=precision)
    parser.add_argument("--tei", nargs=2, metavar=("BINARY", "CHECKPOINT"))
    return parser


def servers(options: argparse.Namespace) -> list[MeasuredServer]:
    """Return ours, and text-embeddings-inference if asked for, both with their default settings."""
    command = (sys.executable, "-m", "cloze", "serve", "--port", "{port}")
    store = ("--model-store", str(options.store), "--precision", options.precision)
    model = ("--model", options.bundle) if options.bundle else ()
    found = [MeasuredServer("Cloze", (*command, *model, *store), "/embed", "/healthz")]
    if options.tei:
        binary, checkpoint = options.tei
        peer = (binary, "--model-id", checkpoint, "--port", "{port}", "--hostname", "127.0.0.1")
        found.append(MeasuredServer("text-embeddings-inference", peer, "/embed", "/health"))
    return found


def main() -> None:
    """Measure, and print the table."""
    allow_many_connections()
    parser = subjects_parser()
    parser.add_argument("--texts", default="questions")
    parser.add_argument("--times", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--stated-ms", type=int, help="time limit that each request states")
    options = parser.parse_args()
    bundle = Store(options.store).open(options.bundle or "cloze-bert")
    subjects = servers(options)
    if options.bundle:
        texts = make_texts(words_of(bundle), 2000, options.texts).texts
        requests = subjects[0].single_requests(texts, ["" for _ in texts])
    else:
        mixed, _ = make_requests(words_of(bundle), bundle.manifest.tokenizer.mask_token or "", 2000)
        requests = [request for request in mixed if request.group != BAD]
    good_s = GOOD_S
    if options.stated_ms:
        good_s = options.stated_ms / 1000
        end = b"\r\nx-request-timeout-ms: %d\r\n\r\n" % options.stated_ms
        requests = [
            replace(request, data=request.data.replace(b"\r\n\r\n", end, 1)) for request in requests
        ]
    print(TABLE)
    for subject in subjects:
        line = measure(subject, requests, options.times, options.seconds, good_s)
        print(uvloop.run(line), flush=True)


if __name__ == "__main__":
    main()
