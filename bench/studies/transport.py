"""Unix stream sockets against pyzmq between a front end and an engine process: decision 11.

    python -m pip install pyzmq
    python -m cloze.bench.studies.transport >bench/results/transport-cpu.md

Two processes exchange requests and results; the engine process computes nothing. The sockets are
the classes of `cloze.service.processes`. The pyzmq side has the threads and sockets of the old
version: PUSH and PULL in each direction, a receiving thread per engine in the front end, and
answers sent by the engine's worker thread. Both use
`cloze.service.processes.frames` and the same workload.

Costs are processor time of all threads of a process, so that other load on the machine changes them
little. Each round measures both transports; figures are medians over the rounds.
"""

import asyncio
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import uvloop

try:
    import zmq
except ModuleNotFoundError:
    sys.exit("this study compares with pyzmq, which the project does not need: pip install pyzmq")

from cloze.bench.machine import describe_machine
from cloze.model_store import Store
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads.embedding import HEAD, EmbeddingRequest, EmbeddingResult
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.service.core import (
    NO_WAIT,
    BatchResult,
    ExpectedWait,
    QueueState,
    Submission,
)
from cloze.service.processes import frames
from cloze.service.processes.engine_process import EngineServer
from cloze.service.processes.frontend import EngineLink, RemoteQueue
from cloze.service.served_models import ServedModel

ROUNDS = 7
DIMENSIONS = 384
LONE_REQUESTS = 1000

Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Equal requests.

    Attributes:
        texts: per request.
        tokens: per text.
        requests: per round.
        concurrency: requests that are in flight at once.
    """

    texts: int
    tokens: int
    requests: int
    concurrency: int


WORKLOADS = (
    Workload(texts=1, tokens=13, requests=10_000, concurrency=32),
    Workload(texts=1, tokens=128, requests=10_000, concurrency=32),
    Workload(texts=32, tokens=13, requests=1000, concurrency=8),
    Workload(texts=32, tokens=128, requests=1000, concurrency=8),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a workload costs.

    Attributes:
        front_end_us: processor time per text.
        engine_us: processor time per text.
        lone_us: median time of a request that is alone.
    """

    front_end_us: float
    engine_us: float
    lone_us: float

    @property
    def both_us(self) -> float:
        """Processor time per text of both processes."""
        return self.front_end_us + self.engine_us


class InstantQueue:
    """A queue whose worker thread answers at once; see `cloze.service.core.Queue`."""

    state = QueueState(0, 0.0)
    dead = None
    draining = False

    def __init__(self) -> None:
        self._rows = np.ones(
            (max(workload.texts for workload in WORKLOADS), DIMENSIONS), np.float32
        )
        self._submitted: SimpleQueue[tuple[Future[BatchResult], int]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, submission: Submission) -> Future[BatchResult]:
        """Hand the request to the worker thread."""
        future: Future[BatchResult] = Future()
        self._submitted.put((future, len(submission.encodings)))
        return future

    def expected_wait(self, *_: object) -> ExpectedWait:
        """See `Queue`."""
        return NO_WAIT

    def drain(self) -> None:
        """See `Queue`."""

    def close(self, timeout_s: float = 5.0) -> None:
        """See `Queue`."""

    def _work(self) -> None:
        while True:
            future, texts = self._submitted.get()
            outputs: list[HeadOutputs] = [
                {HEAD.name: EmbeddingResult(row)} for row in self._rows[:texts]
            ]
            future.set_result(BatchResult(outputs, 0.0, 0.0))


class Submits(Protocol):
    """The front end's half of a transport."""

    def submit(self, submission: Submission) -> Future[BatchResult]:
        """See `cloze.service.core.Queue`."""
        ...


# ---- the engine process --------------------------------------------------------------------------


async def serve_sockets(folder: Path) -> None:
    """Serve with `EngineServer` until killed."""
    bundle = Store(DEFAULT_ROOT).open("cloze-bert")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "engine.sock"))
    listener.listen()
    model = ServedModel(bundle, InstantQueue(), lambda: "fp32")
    await EngineServer([model]).serve(listener)


class ZmqEngine:
    """Receives on the main thread and answers on the thread that ends the future."""

    def __init__(self, folder: Path) -> None:
        context = Context()
        self._receiving = context.socket(zmq.PULL)
        self._receiving.setsockopt(zmq.RCVHWM, 0)
        self._receiving.bind(f"ipc://{folder}/engine")
        self._sending = context.socket(zmq.PUSH)
        self._sending.setsockopt(zmq.SNDHWM, 100_000)
        self._sending.connect(f"ipc://{folder}/front-end")
        self._lock = threading.Lock()
        self._queue = InstantQueue()

    def serve(self) -> None:
        """Serve until killed."""
        while True:
            if self._receiving.poll(200):
                _, message = self._receiving.recv_multipart()
                run = frames.decode_request(message)
                assert isinstance(run, frames.Run)
                future = self._queue.submit(run.submission)
                future.add_done_callback(partial(self._answer, run.number))

    def _answer(self, number: int, future: Future[BatchResult]) -> None:
        message = frames.encode_answer(frames.Answer(number, future.result()))
        with self._lock:
            self._sending.send(message, zmq.NOBLOCK)


# ---- the front end -------------------------------------------------------------------------------


class ZmqLink:
    """Sends on the event loop's thread and receives on its own."""

    def __init__(self, folder: Path) -> None:
        context = Context()
        self._address = f"ipc://{folder}/front-end"
        self._sending = context.socket(zmq.PUSH)
        self._sending.setsockopt(zmq.SNDHWM, 0)
        self._sending.connect(f"ipc://{folder}/engine")
        self._receiving = context.socket(zmq.PULL)
        self._receiving.setsockopt(zmq.RCVHWM, 0)
        self._receiving.bind(self._address)
        self._numbers = itertools.count()
        self._pending: dict[int, Future[BatchResult]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._receive, daemon=True).start()

    def submit(self, submission: Submission) -> Future[BatchResult]:
        """See `cloze.service.core.Queue`."""
        future: Future[BatchResult] = Future()
        with self._lock:
            number = next(self._numbers)
            run = frames.Run(number, 0, submission)
            message = [self._address.encode(), frames.encode_run(run)]
            self._pending[number] = future
            self._sending.send_multipart(message, zmq.NOBLOCK)
        future.add_done_callback(partial(self._forget, number))
        return future

    def _forget(self, number: int, _: Future[BatchResult]) -> None:
        with self._lock:
            del self._pending[number]

    def _receive(self) -> None:
        poller = zmq.Poller()
        poller.register(self._receiving, zmq.POLLIN)
        while True:
            if dict(poller.poll(500)):
                answer = frames.decode_answer(self._receiving.recv())
                assert isinstance(answer, frames.Answer)
                assert isinstance(answer.outcome, BatchResult)
                self._pending[answer.number].set_result(answer.outcome)


async def measure(queue: Submits, workload: Workload, engine: int) -> Cost:
    """Return what a workload costs this process and the engine process."""
    rng = np.random.default_rng(0)
    requests = {HEAD.name: EmbeddingRequest()}
    types = np.zeros(workload.tokens, np.int32)
    encodings = [
        Encoding(rng.integers(5, 900, workload.tokens, dtype=np.int32), types, requests)
        for _ in range(workload.texts)
    ]
    left = iter(range(workload.requests))

    async def client() -> None:
        for _ in left:
            await asyncio.wrap_future(queue.submit(Submission(float("inf"), encodings)))

    async def run_clients() -> None:
        await asyncio.gather(*(client() for _ in range(workload.concurrency)))

    left = iter(range(workload.requests // 10))  # warm-up
    await run_clients()
    left = iter(range(workload.requests))
    own, other = time.process_time(), processor_time(engine)
    await run_clients()
    own, other = time.process_time() - own, processor_time(engine) - other
    lone = []
    for _ in range(LONE_REQUESTS):
        began = time.perf_counter()
        await asyncio.wrap_future(queue.submit(Submission(float("inf"), encodings)))
        lone.append(time.perf_counter() - began)
    texts = workload.requests * workload.texts
    return Cost(own / texts * 1e6, other / texts * 1e6, statistics.median(lone) * 1e6)


def processor_time(pid: int) -> float:
    """Return the seconds that all threads of a process have run."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def measure_all(transport: str, folder: Path, engine: int) -> list[Cost]:
    """Return the costs of all workloads over one transport."""
    if transport == "pyzmq":
        queue: Submits = ZmqLink(folder)
        return [await measure(queue, workload, engine) for workload in WORKLOADS]
    up = asyncio.Event()
    link = EngineLink(folder / "engine.sock", ["cloze-bert@1"], up)
    while not (folder / "engine.sock").exists():
        await asyncio.sleep(0.01)
    connection = asyncio.create_task(link.run())
    await up.wait()
    costs = [await measure(RemoteQueue([link], 0), workload, engine) for workload in WORKLOADS]
    connection.cancel()
    with suppress(asyncio.CancelledError):
        await connection
    return costs


def play(transport: str, role: str, folder: Path, engine: int) -> None:
    """Be one of the two processes."""
    if role == "front-end":
        for cost in uvloop.run(measure_all(transport, folder, engine)):
            print(cost.front_end_us, cost.engine_us, cost.lone_us)
    elif transport == "pyzmq":
        ZmqEngine(folder).serve()
    else:
        uvloop.run(serve_sockets(folder))


def run_round(transport: str) -> list[Cost]:
    """Return the costs of all workloads, measured by two new processes."""
    command = [sys.executable, "-m", "cloze.bench.studies.transport", transport]
    with tempfile.TemporaryDirectory() as folder:
        engine = subprocess.Popen([*command, "engine", folder])
        try:
            front_end = [*command, "front-end", folder, str(engine.pid)]
            lines = subprocess.check_output(front_end, text=True).splitlines()
        finally:
            engine.kill()
            engine.wait()
    return [Cost(*map(float, line.split())) for line in lines]


def codec_us(workload: Workload) -> float:
    """Return the time per text of encoding and decoding alone, in one thread."""
    types = np.zeros(workload.tokens, np.int32)
    requests = {HEAD.name: EmbeddingRequest()}
    encodings = [Encoding(types, types, requests) for _ in range(workload.texts)]
    rows = np.ones((workload.texts, DIMENSIONS), np.float32)
    run = frames.Run(1, 0, Submission(1.0, encodings))
    times = []
    for _ in range(2000):
        began = time.thread_time()
        frames.decode_request(frames.encode_run(run))
        result = BatchResult([{HEAD.name: EmbeddingResult(row)} for row in rows], 0.0, 0.0)
        frames.decode_answer(frames.encode_answer(frames.Answer(1, result)))
        times.append(time.thread_time() - began)
    return statistics.median(times) / workload.texts * 1e6


def print_table(rounds: dict[str, list[list[Cost]]]) -> None:
    """Print the medians, and how often the sockets were cheaper."""
    print("| texts per request, tokens | transport | front end | engine | both | lone request |")
    print("|---|---|---|---|---|---|")
    for index, workload in enumerate(WORKLOADS):
        label = f"{workload.texts}, {workload.tokens}"
        print(f"| {label} | encode and decode alone | | | {codec_us(workload):.1f} | |")
        for transport, costs in rounds.items():
            own = statistics.median(cost[index].front_end_us for cost in costs)
            other = statistics.median(cost[index].engine_us for cost in costs)
            both = statistics.median(cost[index].both_us for cost in costs)
            lone = statistics.median(cost[index].lone_us for cost in costs)
            print(f"| {label} | {transport} | {own:.1f} | {other:.1f} | {both:.1f} | {lone:.0f} |")
    print()
    for index, workload in enumerate(WORKLOADS):
        pairs = list(zip(rounds["sockets"], rounds["pyzmq"], strict=True))
        cheaper = sum(own[index].both_us < other[index].both_us for own, other in pairs)
        print(f"- {workload.texts} x {workload.tokens} tokens: ", end="")
        print(f"sockets cost less in {cheaper} of {len(pairs)} rounds.")


def main() -> None:
    """Print the result as Markdown."""
    rounds: dict[str, list[list[Cost]]] = {"pyzmq": [], "sockets": []}
    for _ in range(ROUNDS):
        for transport, costs in rounds.items():
            costs.append(run_round(transport))
    machine = describe_machine(len(os.sched_getaffinity(0)))
    print("# Unix stream sockets against pyzmq, between a front end and an engine process\n")
    print("    python -m cloze.bench.studies.transport\n")
    print(f"{machine['cores']} cores of {machine['processor']}, {machine['system']},")
    print(f"pyzmq {zmq.__version__}, uvloop {version('uvloop')}.")
    print(f"Medians of {ROUNDS} rounds in turns, in us; embeddings of {DIMENSIONS} numbers.")
    print("Processor time per text; for a lone request, the time that passes.\n")
    print_table(rounds)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        play(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]) if sys.argv[4:] else 0)
    else:
        main()
