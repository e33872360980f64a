"""A service in this process: all protocols over models without weights, whose outputs are by hand.

Its engine derives each output from the ids of the encoding, so that a test can tell what was run.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route as Path_
from starlette.types import Receive, Scope, Send

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import ArrayResult
from cloze.model_store.heads.masked_lm import MaskedLMResult
from cloze.model_store.heads.sparse_embedding import SparseEmbeddingResult
from cloze.model_store.manifest import Precision
from cloze.service.batching.admission import SchedulerLimits
from cloze.service.batching.scheduler import Scheduler
from cloze.service.core import Changes, Device, ServedRequest
from cloze.service.errors import EngineDead, ServiceError, ShuttingDown
from cloze.service.http.body import BodyLimits, RequestLimits
from cloze.service.http.bytes_held import ByteBudget
from cloze.service.http.record import Callers
from cloze.service.http.routes import RECORD, Route
from cloze.service.models.pipeline import Models, Pipeline
from cloze.service.models.served_models import ServedModel
from cloze.service.observe.metrics import Metrics
from cloze.service.protocols import ProtocolContext, error_response, routes_of
from cloze.service.tasks import TASKS, Task, TaskLimits
from tests.support.task_model import ID, bundle

CLASSES = {
    "sequence_classification": {"labels": ["a", "b", "c", "d"], "problem_type": "regression"}
}
CLASSIFIER = {
    "name": "classes", "tasks": ("text-classification",), "embedding": None, "heads": CLASSES,
}  # fmt: skip
EMBEDDER = {"name": "small", "version": 1, "tasks": ("embed",), "heads": {}}
"""Changes of a manifest: a model that only classifies, and a small one that only embeds."""

LIMITS = TaskLimits(
    max_tokens=12,
    max_masks=3,
    max_top_k=50,
    max_results=4000,
    max_request_tokens=4000,
    max_text_characters=200,
    max_request_texts=300,
)
BODY_LIMITS, MAX_TEXTS = BodyLimits(200_000, 40_000, 50_000), 3

VECTOR, OTHER_VECTOR = [3.0, 0.0, 4.0, 0.0], [0.0, 0.0, 2.0, 0.0]
"""The embeddings of a text of one word, and of any other one. Their cosine is 0.8."""


class HandEngine:
    """Returns outputs by hand; raises for a text with the word "war"."""

    device = Device.CPU
    precision = Precision.FP32
    reason = "the test says so"
    supports_varlen = False
    adapters = None
    runs = 0

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        self.runs += 1
        if any(ID["war"] in encoding.input_ids for encoding in batch):
            raise RuntimeError("a poisoned encoding")
        outputs = [_outputs(encoding) for encoding in batch]
        for result in (result for output in outputs for result in output.values()):
            for name in result.__slots__:  # as equal texts share their results
                getattr(result, name).flags.writeable = False
        return outputs

    def probe(self) -> None:
        """Pass."""


def _outputs(encoding: Encoding) -> HeadOutputs:
    n = len(encoding)
    rows = np.repeat(encoding.input_ids[:, None], 4, 1).astype(np.float32)
    made: dict[str, Any] = {
        "embedding": ArrayResult(np.array(VECTOR if n == 3 else OTHER_VECTOR, np.float32)),
        "sparse_embedding": SparseEmbeddingResult(
            np.array([2, 1], np.float32), np.array([ID["the"], ID["of"]])
        ),
        "token_embedding": ArrayResult(rows),
        "next_sentence": ArrayResult(np.array([1, -1], np.float32)),
        "sequence_classification": ArrayResult(np.array([n, 3, 0, 2], np.float32)),
        "token_classification": ArrayResult(np.eye(4, dtype=np.float32)[[1] * n] * 9),
        "span": ArrayResult(np.eye(n, 2, dtype=np.float32) * 9),
    }
    if (request := encoding.requests.get("masked_lm")) is not None:
        m, k = len(request.positions), request.top_k  # type: ignore[attr-defined]
        logits = np.tile(-np.arange(k, dtype=np.float32), (m, 1))
        top_ids = np.tile(np.arange(k) + ID["the"], (m, 1))
        targets = np.zeros((m, len(request.targets)), np.float32)  # type: ignore[attr-defined]
        made["masked_lm"] = MaskedLMResult(logits, top_ids, np.ones(m, np.float32), targets)
    if (asked := encoding.requests.get("entities")) is not None:
        words, labels = len(asked.words), len(asked.labels)  # type: ignore[attr-defined]
        made["entities"] = ArrayResult(np.full((words, 2, labels), 3, np.float32))
    return {name: made[name] for name in encoding.requests}


@dataclass
class State:
    """The state of a server, which a test sets."""

    dead: str | None = None
    draining: bool = False
    restarts_engines: bool = False
    has_engines: bool = True
    changes: Changes = field(default_factory=lambda: Changes(["a@2"], ["a@1"], []))

    def why_unready(self) -> ServiceError | None:
        if self.dead is not None:
            return EngineDead(f"the engine is dead: {self.dead}")
        return ShuttingDown("the server is shutting down") if self.draining else None

    def why_restart(self) -> ServiceError | None:
        return None if self.dead is None or self.restarts_engines else self.why_unready()

    async def reload(self) -> Changes:
        return self.changes


class Service:
    """The routes of all protocols over some models.

    `described` has changes of the manifest per model; the first model is the default. The folder is
    for a tokenizer. `scope` is added to the scopes of requests, and `seen` is the record of the
    last request, as the application left it.
    """

    def __init__(
        self,
        folder: Path,
        described: Iterable[dict[str, Any]] = ({},),
        *,
        tasks: dict[str, Task] = TASKS,
        callers: Callers | None = None,
        aliases: dict[str, str] | None = None,
    ) -> None:
        limits = SchedulerLimits(1, 512, 100_000, 30.0)
        self.engine = HandEngine()
        self.queues: list[Scheduler] = []
        pipelines = []
        for changes in described:
            self.queues.append(Scheduler(self.engine, limits))
            self.queues[-1].start()
            served = ServedModel(bundle(folder, **changes), self.queues[-1], lambda: "fp32")
            pipelines.append(Pipeline(served, LIMITS))
        self.state, self.scope = State(), dict[str, Any]()
        self.seen: ServedRequest
        self._callers = callers or Callers(max_timeout_s=60.0)
        self.metrics = Metrics([pipeline.manifest.reference for pipeline in pipelines])
        self.limits = RequestLimits(
            ByteBudget("bodies", 1_000_000), ByteBudget("unread answers", 1_000_000)
        )
        self.context = ProtocolContext(
            tasks,
            Models(pipelines, tasks.values(), aliases=aliases),
            self.metrics,
            self.state,
            BODY_LIMITS,
            MAX_TEXTS,
            self.limits,
            has_keys=self._callers.keys is not None,
        )
        self.routes = routes_of(self.context)
        self._app = _application(self.routes)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._runner.close()
        for queue in self.queues:
            queue.close()

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope |= self.scope
        self.seen = scope[RECORD] = self._callers.record(scope, scope["path"])
        await self._app(scope, receive, send)

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Return the answer to a request; see `httpx.request`."""

        async def play() -> httpx.Response:
            transport = httpx.ASGITransport(self._call, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://cloze") as client:
                return await client.request(method, path, **options)

        return self._runner.run(play())

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", path, json=body, headers=sent)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.ask("GET", path, headers=headers)


def _application(routes: Iterable[Route]) -> Starlette:
    paths = [Path_(route.path, route.handler, methods=[route.method]) for route in routes]
    respond = partial(error_response, timeout_s=30.0)
    handlers = dict.fromkeys((ServiceError, HTTPException, Exception), respond)
    return Starlette(routes=paths, exception_handlers=handlers)  # type: ignore[arg-type]


class OneLabel(HandEngine):
    """The engine of a classifier of one label, whose logit is the length of the sequence."""

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        rows = [np.array([len(encoding)], np.float32) for encoding in batch]
        return [{"sequence_classification": ArrayResult(row)} for row in rows]
