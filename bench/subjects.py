"""Describes what is measured: the engine alone, our server, and its peers."""

import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import orjson
from hdrh.histogram import HdrHistogram

from cloze.bench.http_client import post
from cloze.bench.load import Request, histogram
from cloze.bench.processes import RunningServer, free_port, running
from cloze.bench.throughput import batches_for, rounds_per_s, run_all
from cloze.model_store import Manifest, Store
from cloze.model_store.batch import Encoding
from cloze.service.core import Device, RequestedPrecision
from cloze.service.engine import OnnxEngine
from cloze.service.served_models import batch_tokens
from cloze.service.settings import Settings
from cloze.service.tasks import Task, TaskCall, TaskContext, TaskLimits
from cloze.service.tokenizer import Tokenizer

_WARM_UP_RUNS = 20
"""Runs of the engine before its latencies count."""


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A bundle, what is requested of it, and how it runs.

    Attributes:
        bundle: the bundle's name.
        store: folder of the model store.
        task: of every request.
        precision: of the graph.
        device: where the graph runs.
    """

    bundle: str
    store: Path
    task: Task
    precision: RequestedPrecision = "auto"
    device: Device = Device.CPU


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """How to start a server, and how to send texts to the server.

    Attributes:
        name: in tables.
        command: starts the server; ``{port}`` stands for the port.
        path: receives the texts.
        ready_path: answers 200 when the server is ready.
        field: of the body, holds the texts.
        extra: further fields of the body.
        environment: further variables beside this process's variables without ``CLOZE_*``.
        parts: whether the server's ``/metrics`` has the duration of each part of a request.
        lists: whether a request may hold several texts.
        ready_timeout_s: for the server to become ready.
    """

    name: str
    command: tuple[str, ...]
    path: str
    ready_path: str
    field: str = "inputs"
    extra: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parts: bool = False
    lists: bool = True
    ready_timeout_s: float = 180.0

    def start(self) -> AbstractContextManager[RunningServer]:
        """Run the server until the context ends.

        Raises:
            BenchError: the server does not become ready.
        """
        port = free_port()
        own = {name: value for name, value in os.environ.items() if not name.startswith("CLOZE_")}
        return running(
            [part.format(port=port) for part in self.command],
            f"http://127.0.0.1:{port}",
            self.ready_path,
            environment=own | dict(self.environment),
            timeout_s=self.ready_timeout_s,
        )

    def requests(self, texts: Sequence[str], *, each: int = 1) -> list[Request]:
        """Return requests of `each` texts; a single text is sent as a string."""
        groups = [texts[start : start + each] for start in range(0, len(texts), each)]
        return [self._request(group[0] if each == 1 else group, len(group)) for group in groups]

    def _request(self, inputs: str | Sequence[str], texts: int) -> Request:
        body = orjson.dumps({self.field: inputs} | dict(self.extra))
        return Request(post(self.path, body), texts)


def cloze_server(title: str, model: MeasuredModel, frontends: int = 0) -> MeasuredServer:
    """Return our server on one bundle, in this environment, with the default settings.

    Args:
        title: begins the server's name; the number of front ends and "server" follow.
        model: what to serve.
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
    return MeasuredServer(name, command, model.task.route, "/readyz", parts=True)


def infinity_server(python: str, checkpoint: Path, engine: str) -> MeasuredServer:
    """Return infinity-emb in its own environment.

    Args:
        python: interpreter of the environment.
        checkpoint: a Hugging Face directory.
        engine: ``torch`` or ``optimum``.
    """
    options = {
        "--model-id": str(checkpoint.resolve()),
        "--served-model-name": "m",
        "--engine": engine,
        "--device": "cpu",
        "--port": "{port}",
    }
    arguments = [part for option in options.items() for part in option]
    if engine == "optimum":
        arguments.append("--onnx-do-not-prefer-quantized")
    return MeasuredServer(
        f"infinity-emb {engine}",
        (str(Path(python).parent / "infinity_emb"), "v2", *arguments),
        "/embeddings",
        "/health",
        field="input",
        extra={"model": "m"},
        environment={
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
            "INFINITY_ANONYMOUS_USAGE_STATS": "0",
        },
    )


def pipeline_server(python: str, checkpoint: Path, task: Task) -> MeasuredServer:
    """Return a FastAPI application around a transformers pipeline, in its own environment.

    Args:
        python: interpreter of the environment.
        checkpoint: a Hugging Face directory.
        task: of every request.
    """
    application = ("-m", "cloze.bench.peers.pipeline_app")
    return MeasuredServer(
        "FastAPI + transformers",
        (python, *application, str(checkpoint.resolve()), task.name, "{port}"),
        task.route,
        "/healthz",
        environment={"HF_HUB_OFFLINE": "1"},
        lists=False,
    )


def _task_limits(manifest: Manifest, settings: Settings) -> TaskLimits:
    unlimited = 2**31
    return TaskLimits(
        max_tokens=manifest.limits.max_tokens,
        max_masks=settings.max_masks,
        max_top_k=settings.max_top_k,
        max_results=unlimited,
        max_request_tokens=unlimited,
        max_text_characters=settings.max_text_characters,
        max_request_texts=unlimited,
    )


class EngineAlone:
    """A bundle's engine without a server: the upper bound for a server on the same texts.

    Args:
        model: what to measure.
        texts: inputs of the task.
    """

    def __init__(self, model: MeasuredModel, texts: Sequence[str]) -> None:
        bundle = Store(model.store).open(model.bundle)
        settings = Settings()
        self._engine = OnnxEngine(bundle, model.device, model.precision)
        self._workers = settings.worker_count(self._engine.device)
        limits = _task_limits(bundle.manifest, settings)
        context = TaskContext(bundle.manifest, Tokenizer(bundle), limits)
        call = TaskCall(list(texts), model.task.parameters())
        self._encodings: list[Encoding] = model.task.prepare(call, context).encodings
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
        """Measure single texts, one after the other; return their latencies in microseconds."""
        latencies = histogram()
        for encoding in self._encodings[:_WARM_UP_RUNS]:
            self._engine.run([encoding])
        end = time.perf_counter() + seconds
        number = 0
        while (begin := time.perf_counter()) < end:
            self._engine.run([self._encodings[number % len(self._encodings)]])
            latencies.record_value(max(1, round((time.perf_counter() - begin) * 1e6)))
            number += 1
        return latencies
