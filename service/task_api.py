"""The task routes: parse a body, ask a pipeline, shape its answer as the protocols have it. Errors are `api`'s."""

import asyncio
import io
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from model_store import Task
from service import core
from service.http import client_gone, read_body
from service.metrics import Metrics
from service.pipeline import Models, Pipeline, Reply
from service.schemas import (
    Body,
    Candidates,
    EmbedBody,
    FillMaskBody,
    FillMaskParameters,
    NspBody,
    OpenAiEmbeddingsBody,
    Pair,
    QaBody,
    QaPair,
)
from service.tasks.embed import EmbedOptions
from service.tasks.qa import QaOptions

B = TypeVar("B", bound=Body)
T = TypeVar("T")

OPENAI_EMBEDDINGS = "/v1/embeddings"

TASK_ROUTES = {
    "/fill-mask": Task.FILL_MASK,
    "/embed": Task.EMBED,
    "/nsp": Task.NSP,
    "/qa": Task.QA,
    OPENAI_EMBEDDINGS: Task.EMBED,
}
"""The task that each route answers with."""

BODIES: dict[str, type[Body]] = {
    "/fill-mask": FillMaskBody,
    "/embed": EmbedBody,
    "/nsp": NspBody,
    "/qa": QaBody,
    OPENAI_EMBEDDINGS: OpenAiEmbeddingsBody,
}
"""The body that each route reads."""

_SUMMARIES = {
    "/fill-mask": "The likeliest tokens at each [MASK]",
    "/embed": "One vector a text",
    "/nsp": "Whether one text follows another",
    "/qa": "The span of a context that answers a question",
    OPENAI_EMBEDDINGS: "One vector a text, as OpenAI's API has it",
}

_INLINE_BYTES = 65_536
"""Larger bodies are parsed on a thread, so that the event loop answers probes meanwhile."""

JSON = "application/json"
_RAW = "application/octet-stream"
_NPY = "application/x-npy"


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """What the API itself refuses; the tasks have limits of their own."""

    max_request_bytes: int
    max_request_texts: int
    request_timeout_s: float


class TaskApi:
    """One method a route.

    Args:
        models: who answers.
        metrics: told of each answer's parts.
        limits: see `ApiLimits`.
    """

    def __init__(self, models: Models, metrics: Metrics, limits: ApiLimits) -> None:
        self._models = models
        self._metrics = metrics
        self._limits = limits

    def handlers(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        """Who answers POST on each route."""
        return {
            "/fill-mask": self.fill_mask,
            "/embed": self.embed,
            "/nsp": self.nsp,
            "/qa": self.qa,
            OPENAI_EMBEDDINGS: self.openai_embeddings,
        }

    def router(self) -> APIRouter:
        """The same as routes, for the documentation and for other methods' 405."""
        router = APIRouter(tags=["tasks"])
        for path, handler in self.handlers().items():
            router.post(path, summary=_SUMMARIES[path])(handler)
        return router

    async def fill_mask(self, request: Request) -> Response:
        """One text with masks or many; an answer each."""
        body = await self._receive(request, FillMaskBody)
        texts = self._listed(body.inputs)
        pipeline = self._choose(request, body.model)
        asked = body.parameters or FillMaskParameters()
        targets = [asked.targets] if isinstance(asked.targets, str) else asked.targets or []
        top_k = 5 if asked.top_k is None else asked.top_k
        many = isinstance(body.inputs, list)
        reply = await self._answer(request, pipeline, pipeline.fill_mask(texts, top_k=top_k, targets=targets, many=many))
        results: list[object] = [_one_or_many(masks) for masks in reply.value]
        return _respond(reply, orjson.dumps(results if many else results[0]))

    async def embed(self, request: Request) -> Response:
        """One text or many; a vector each."""
        body = await self._receive(request, EmbedBody)
        texts, many = self._texts(body.inputs)
        pipeline = self._choose(request, body.model)
        options = EmbedOptions(
            body.normalize, body.dimensions, body.prompt_name, body.truncate, keep_end=body.truncation_direction == "left"
        )
        reply = await self._answer(request, pipeline, pipeline.embed(texts, options, many=many))
        return _respond_vectors(request, reply)

    async def openai_embeddings(self, request: Request) -> Response:
        """One text or many; a vector each, in OpenAI's shape."""
        body = await self._receive(request, OpenAiEmbeddingsBody)
        texts, many = self._texts(body.input)
        pipeline = self._choose(request, body.model)
        reply = await self._answer(request, pipeline, pipeline.embed(texts, EmbedOptions(dimensions=body.dimensions), many=many))
        vectors: Iterable[object] = reply.value.astype("<f4", copy=False)
        if body.encoding_format == "base64":
            vectors = (b64encode(vector).decode() for vector in reply.value.astype("<f4", copy=False))
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
        usage = {"prompt_tokens": reply.tokens, "total_tokens": reply.tokens}
        answer = {"object": "list", "data": data, "model": body.model, "usage": usage}
        return _respond(reply, orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY))

    async def nsp(self, request: Request) -> Response:
        """A pair, many pairs, or a text with candidates to rank."""
        body = await self._receive(request, NspBody)
        inputs = body.inputs
        if isinstance(inputs, Candidates):
            pairs = [(inputs.text, candidate) for candidate in self._listed(inputs.candidates)]
            names = [f"inputs.candidates[{index}]" for index in range(len(pairs))]
        else:
            pairs = [(pair.text, pair.next) for pair in self._listed(inputs)]
            names = _names(inputs)
        pipeline = self._choose(request, body.model)
        reply = await self._answer(request, pipeline, pipeline.nsp(pairs, names))
        scores = reply.value.tolist()
        if isinstance(inputs, Candidates):
            order = sorted(range(len(scores)), key=lambda index: -scores[index][0])
            return _respond(
                reply, orjson.dumps([{"index": index, "score": scores[index][0], "text": pairs[index][1]} for index in order])
            )
        results = [[{"label": "IsNext", "score": one}, {"label": "NotNext", "score": other}] for one, other in scores]
        return _respond(reply, orjson.dumps(results[0] if isinstance(inputs, Pair) else results))

    async def qa(self, request: Request) -> Response:
        """A question with its context or many; the best answers to each."""
        body = await self._receive(request, QaBody)
        pairs = [(pair.question, pair.context) for pair in self._listed(body.inputs)]
        options = QaOptions(**(body.parameters.model_dump(exclude_none=True) if body.parameters else {}))
        pipeline = self._choose(request, body.model)
        reply = await self._answer(request, pipeline, pipeline.qa(pairs, _names(body.inputs), options))
        results: list[object] = [_one_or_many(answers) for answers in reply.value]
        return _respond(reply, orjson.dumps(results[0] if isinstance(body.inputs, QaPair) else results))

    async def _receive(self, request: Request, kind: type[B]) -> B:
        data = await read_body(request, self._limits.max_request_bytes, self._limits.request_timeout_s)
        return _parse(kind, data) if len(data) <= _INLINE_BYTES else await asyncio.to_thread(_parse, kind, data)

    def _texts(self, inputs: Any) -> tuple[list[Any], bool]:
        """One text, its token ids, or a list of either, as a list; and whether it was one."""
        is_one = isinstance(inputs, str) or (bool(inputs) and isinstance(inputs[0], int))
        return self._listed([inputs] if is_one else inputs), not is_one

    def _listed(self, inputs: Any) -> list[Any]:
        """One or many as a list, neither empty nor too long."""
        texts = inputs if isinstance(inputs, list) else [inputs]
        if not texts:
            raise core.EmptyRequest("inputs is an empty list; it needs at least 1 text")
        if len(texts) > self._limits.max_request_texts:
            raise core.InvalidRequest(f"inputs has {len(texts)} texts; the limit is {self._limits.max_request_texts}")
        return texts

    def _choose(self, request: Request, name: str | None) -> Pipeline:
        pipeline = self._models.choose(TASK_ROUTES[request.scope["path"]], name)
        request.scope["cloze.model"] = pipeline.manifest.reference
        return pipeline

    async def _answer(self, request: Request, pipeline: Pipeline, work: Awaitable[Reply[T]]) -> Reply[T]:
        async with client_gone(request):
            reply = await work
        self._metrics.observe_parts(pipeline.manifest.reference, reply.timings, reply.truncated)
        return reply


def _parse(kind: type[B], data: bytes) -> B:
    if not data.strip():
        raise core.MalformedRequest("the body is empty; send a JSON object")
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        if problems[0]["type"] == "json_invalid":
            reason = problems[0]["ctx"]["error"]
            hint = "; \\ud800 to \\udfff, surrogates, must come in pairs" if "hex escape" in reason else ""
            raise core.MalformedRequest(f"the body is not JSON: {reason}{hint}") from None
        raise core.InvalidRequest(_describe(problems)) from None


def _describe(problems: Sequence[Any]) -> str:
    """The first problem and, where it is a choice of several shapes, the others at that place; never the value."""
    first = problems[0]["loc"][0] if problems[0]["loc"] else "the body"
    lines = dict.fromkeys(
        f"{'.'.join(str(part) for part in problem['loc'] if not _is_shape(part)) or 'the body'}: {problem['msg']}"
        for problem in problems
        if not problem["loc"] or problem["loc"][0] == first
    )
    return "; ".join(list(lines)[:4])


def _is_shape(part: object) -> bool:
    """Whether a part of a location is pydantic's name of a union's member, not a field or an index."""
    return isinstance(part, str) and (
        part in ("str", "int", "Pair", "Candidates", "QaPair") or part.startswith(("list[", "function-"))
    )


def _names(inputs: object) -> list[str]:
    return [f"inputs[{index}]" for index in range(len(inputs))] if isinstance(inputs, list) else ["inputs"]


def _one_or_many(results: Sequence[T]) -> T | Sequence[T]:
    return results[0] if len(results) == 1 else results


def _respond(reply: Reply[Any], content: bytes, media_type: str = JSON, headers: dict[str, str] | None = None) -> Response:
    timings = reply.timings
    total = _milliseconds(timings.tokenize_s + timings.queue_s + timings.inference_s)
    response = Response(content, headers=headers, media_type=media_type)
    response.raw_headers += [
        (b"x-compute-time", total),
        (b"x-total-time", total),
        (b"x-tokenization-time", _milliseconds(timings.tokenize_s)),
        (b"x-queue-time", _milliseconds(timings.queue_s)),
        (b"x-inference-time", _milliseconds(timings.inference_s)),
        (b"x-compute-tokens", b"%d" % reply.tokens),
        (b"x-truncated", b"%d" % reply.truncated),
    ]
    if reply.warnings:
        response.raw_headers.append((b"x-warning", "; ".join(reply.warnings)[:2000].encode("ascii")))
    return response


def _respond_vectors(request: Request, reply: Reply[core.Float32]) -> Response:
    """Vectors as the client accepts them: JSON, raw little-endian float32 with ``x-shape``, or NumPy's file format."""
    accepted = _accepted(request.headers.get("accept", ""))
    vectors = reply.value.astype("<f4", copy=False)
    if accepted == _RAW:
        return _respond(reply, vectors.tobytes(), _RAW, {"x-shape": ",".join(map(str, vectors.shape))})
    if accepted == _NPY:
        file = io.BytesIO()
        np.save(file, vectors)
        return _respond(reply, file.getvalue(), _NPY)
    return _respond(reply, orjson.dumps(vectors, option=orjson.OPT_SERIALIZE_NUMPY))


def _accepted(header: str) -> str:
    """Which of our types an ``Accept`` header prefers; JSON unless another has a higher weight (RFC 9110, section 12.5.1)."""
    best, best_weight = JSON, 0.0
    for item in header.split(","):
        kind, *parameters = (part.strip() for part in item.lower().split(";"))
        weights = [value[2:] for value in parameters if value.startswith("q=")]
        weight = float(weights[0]) if weights and weights[0].replace(".", "", 1).isdecimal() else 1.0
        if kind in (JSON, _RAW, _NPY) and (weight > best_weight or (weight == best_weight > 0 and kind == JSON)):
            best, best_weight = kind, weight
    return best


def _milliseconds(seconds: float) -> bytes:
    return b"%d" % round(seconds * 1000)  # whole numbers, as text-embeddings-inference's clients expect
