"""What is measured of ours: the engine alone, and the server."""

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from hdrh.histogram import HdrHistogram

from cloze.bench.load import histogram
from cloze.bench.processes import MeasuredServer
from cloze.model_store import Store
from cloze.model_store.batch import Encoding
from cloze.service.core import Device, Engine, RequestedPrecision
from cloze.service.models.pipeline import task_limits
from cloze.service.models.served_models import batch_tokens, onnx_engine
from cloze.service.settings import Settings
from cloze.service.tasks import Task, TaskContext

_WARM_UP_RUNS = 20
"""Runs of the engine before its latencies count."""

_UNLIMITED = 2**31


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A bundle, what is requested of it, and how it runs."""

    bundle: str
    store: Path
    task: Task
    precision: RequestedPrecision = "auto"
    device: Device = Device.CPU


def cloze_server(title: str, model: MeasuredModel, frontends: int = 0) -> MeasuredServer:
    """Return our server on one bundle, in this environment, with the default settings.

    Args:
        title: begins the server's name; the number of front ends and "server" follow.
        frontends: number of front end processes; 0: one process does everything.
    """
    options = {
        "--port": "{port}",
        "--model": model.bundle,
        "--model-store": str(model.store),
        "--device": str(model.device),
        "--precision": str(model.precision),
    }
    name = f"{title} server"
    if frontends:
        options["--frontends"] = str(frontends)
        name = f"{title} {frontends} front end{'s' * (frontends > 1)} server"
    arguments = [part for option in options.items() for part in option]
    command = (sys.executable, "-m", "cloze", "serve", *arguments)
    engine = f"{title} engine"
    return MeasuredServer(name, command, model.task.route, "/readyz", engine=engine)


class EngineAlone:
    """A bundle's engine without a server: the upper bound for a server on the same texts."""

    def __init__(self, model: MeasuredModel, texts: Sequence[str]) -> None:
        bundle = Store(model.store).open(model.bundle)
        settings = Settings()
        self._engine = onnx_engine(settings)(bundle, model.device, model.precision)
        self._workers = settings.worker_count(self._engine.device)
        limits = replace(
            task_limits(settings, bundle.manifest),
            max_results=_UNLIMITED,
            max_request_tokens=_UNLIMITED,
            max_request_texts=_UNLIMITED,
        )
        context = TaskContext.of(bundle, limits)
        prepared = model.task.prepare(list(texts), model.task.parameters(), context)
        self._encodings: list[Encoding] = prepared.encodings
        budget = batch_tokens(bundle, self._engine, settings)
        self._batches = batches_for(self._engine, self._encodings, budget)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return [len(encoding) for encoding in self._encodings]

    def texts_per_s(self, seconds: float) -> float:
        """Return texts per second over whole rounds of all texts, for about `seconds`."""
        rounds = rounds_per_s(lambda: run_all(self._engine, self._batches, self._workers), seconds)
        return rounds * len(self._encodings)

    def single_latencies(self, seconds: float) -> HdrHistogram:
        """Measure single texts, one after the other, as the server runs a lone request.

        Returns:
            The latencies in microseconds.
        """
        latencies = histogram()
        for encoding in self._encodings[:_WARM_UP_RUNS]:
            self._engine.run([encoding], alone=True)
        end = time.perf_counter() + seconds
        number = 0
        while (begin := time.perf_counter()) < end:
            encoding = self._encodings[number % len(self._encodings)]
            self._engine.run([encoding], alone=True)
            latencies.record_value(max(1, round((time.perf_counter() - begin) * 1e6)))
            number += 1
        return latencies


def rounds_per_s(play_round: Callable[[], object], seconds: float) -> float:
    """Return how many rounds run per second."""
    rounds, started = 0, time.perf_counter()
    while not rounds or time.perf_counter() - started < seconds:
        play_round()
        rounds += 1
    return rounds / (time.perf_counter() - started)


def run_all(engine: Engine, batches: Sequence[Sequence[Encoding]], workers: int) -> None:
    """Run every batch once on `workers` threads, the last batch first.

    Raises:
        Exception: the first exception of the engine.
    """
    with ThreadPoolExecutor(workers) as pool:
        deque(pool.map(engine.run, reversed(batches)), maxlen=0)


def cut_batches(encodings: Sequence[Encoding], batch_tokens: int) -> list[list[Encoding]]:
    """Cut the encodings, in their order, into batches of at most `batch_tokens` tokens.

    A longer encoding is a batch of its own.
    """
    batches: list[list[Encoding]] = []
    tokens = batch_tokens
    for encoding in encodings:
        if tokens + len(encoding) > batch_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(encoding)
        tokens += len(encoding)
    return batches


def batches_for(
    engine: Engine, encodings: Sequence[Encoding], batch_tokens: int
) -> list[list[Encoding]]:
    """Cut the encodings into batches that the engine supports.

    An engine with variable-length batches takes the encodings in their order. Another engine takes
    batches of one length each, in ascending order of length.
    """
    if engine.supports_varlen:
        return cut_batches(encodings, batch_tokens)
    groups: dict[int, list[Encoding]] = defaultdict(list)
    for encoding in encodings:
        groups[len(encoding)].append(encoding)
    return [
        batch for _, group in sorted(groups.items()) for batch in cut_batches(group, batch_tokens)
    ]
