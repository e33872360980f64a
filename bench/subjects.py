"""What is measured: the engine alone, our server, and its peers. Each says how to start and how a text is sent to it."""

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

from bench.http_client import post
from bench.load import Request, histogram
from bench.processes import Running, free_port, running
from bench.throughput import batches_for, rounds_per_s, run_all
from model_store import Manifest, Store
from model_store.batch import Encoding
from service.core import Device, RequestedPrecision
from service.engine import OnnxEngine
from service.served_models import batch_tokens
from service.settings import Settings
from service.tasks import Task, TaskCall, TaskContext, TaskLimits
from service.tokenizer import Tokenizer

_WARM_UP = 20
"""Runs of the engine before its latencies count."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server.

    Attributes:
        name: in tables.
        command: starts it; ``{port}`` stands for the port.
        path: where texts are posted.
        ready_path: answers 200 once it is ready.
        field: of the body that holds the texts.
        extra: further fields of the body.
        environment: variables besides this process's own, less those that set Cloze.
        parts: whether its `/metrics` says where a request's time went.
        lists: whether a request may hold several texts.
        ready_timeout_s: for it to become ready.
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

    def start(self) -> AbstractContextManager[Running]:
        """Run it while the context lasts."""
        port = free_port()
        own = {name: value for name, value in os.environ.items() if not name.startswith("CLOZE_")}
        command = [part.format(port=port) for part in self.command]
        environment = own | dict(self.environment)
        return running(
            command,
            f"http://127.0.0.1:{port}",
            self.ready_path,
            environment=environment,
            timeout_s=self.ready_timeout_s,
        )

    def requests(self, texts: Sequence[str], *, each: int = 1) -> list[Request]:
        """The texts as requests of ``each``; a single one is sent as a string."""
        groups = [texts[at : at + each] for at in range(0, len(texts), each)]
        return [
            Request(
                post(
                    self.path,
                    orjson.dumps(
                        {self.field: group[0] if each == 1 else list(group)} | dict(self.extra)
                    ),
                ),
                len(group),
            )
            for group in groups
        ]


def cloze(
    name: str,
    bundle: str,
    store: Path,
    path: str,
    precision: RequestedPrecision,
    device: Device = Device.CPU,
    frontends: int = 0,
) -> Served:
    """Our server on one bundle, in this environment, as it is unless told otherwise."""
    own = (
        "--model",
        bundle,
        "--model-store",
        str(store),
        "--device",
        str(device),
        "--precision",
        str(precision),
    )
    several = ("--frontends", str(frontends)) if frontends else ()
    command = (sys.executable, "-m", "cloze", "serve", "--port", "{port}", *own, *several)
    return Served(name, command, path, "/readyz", parts=True)


def infinity(python: str, checkpoint: Path, engine: str) -> Served:
    """infinity-emb, in an environment of its own.

    Args:
        python: its environment's interpreter.
        checkpoint: a Hugging Face directory.
        engine: ``torch`` or ``optimum``.
    """
    model = str(checkpoint.resolve())
    infinity_emb = str(Path(python).parent / "infinity_emb")
    options: tuple[str, ...] = (
        "--model-id",
        model,
        "--served-model-name",
        "m",
        "--engine",
        engine,
        "--device",
        "cpu",
        "--port",
        "{port}",
    )
    options += ("--onnx-do-not-prefer-quantized",) if engine == "optimum" else ()
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    return Served(
        f"infinity-emb {engine}",
        (infinity_emb, "v2", *options),
        "/embeddings",
        "/health",
        "input",
        {"model": "m"},
        offline,
    )


def pipeline(python: str, checkpoint: Path, task: Task) -> Served:
    """FastAPI around a transformers pipeline."""
    command = (
        python,
        "-m",
        "bench.peers.pipeline_app",
        str(checkpoint.resolve()),
        task.name,
        "{port}",
    )
    return Served(
        "FastAPI + transformers",
        command,
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
    """A bundle's engine without a server: the most that these texts can give.

    Args:
        bundle: its name.
        store: where it is.
        task: what every text is asked.
        texts: already those of the task.
        precision: as a server is asked for.
        device: as a server is asked for.
    """

    def __init__(
        self,
        bundle: str,
        store: Path,
        task: Task,
        texts: Sequence[str],
        *,
        precision: RequestedPrecision,
        device: Device = Device.CPU,
    ) -> None:
        opened = Store(store).open(bundle)
        settings = Settings()
        self._engine = OnnxEngine(opened, device, precision)
        self._workers = settings.worker_count(self._engine.device)
        budget = batch_tokens(opened, self._engine, settings)
        context = TaskContext(
            opened.manifest, Tokenizer(opened), _task_limits(opened.manifest, settings)
        )
        call = TaskCall(list(texts), task.parameters())
        self._queries: list[Encoding] = task.prepare(call, context).encodings
        self._batches = batches_for(self._engine, self._queries, budget)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return [len(query) for query in self._queries]

    def run(self, seconds: float) -> float:
        """Texts a second over whole rounds of all texts, for about so many seconds."""
        return rounds_per_s(
            lambda: run_all(self._engine, self._batches, self._workers), seconds
        ) * len(self._queries)

    def one_at_a_time(self, seconds: float) -> HdrHistogram:
        """Latencies in microseconds of single texts, one after the other, in the texts' order."""
        found = histogram()
        for query in self._queries[:_WARM_UP]:
            self._engine.run([query])
        end = time.perf_counter() + seconds
        number = 0
        while (begin := time.perf_counter()) < end:
            self._engine.run([self._queries[number % len(self._queries)]])
            found.record_value(max(1, round((time.perf_counter() - begin) * 1e6)))
            number += 1
        return found
