"""HTTP: reads bodies, asks the pipelines, writes answers. Errors become responses here, by one table. Knows no tokens."""

import io
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, TypeVar

import numpy as np
import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi_offline import FastAPIOffline
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from model_store import Task
from service import core
from service.http import Connection, client_gone, read_body
from service.metrics import CONTENT_TYPE, Metrics
from service.pipeline import Models, Pipeline, Reply
from service.schemas import Body, Candidates, EmbedBody, FillMaskBody, NspBody, Pair, QaBody, QaPair
from service.tasks.embed import EmbedOptions
from service.tasks.fill_mask import Masks
from service.tasks.qa import QaAnswer, QaOptions

B = TypeVar("B", bound=Body)
T = TypeVar("T")

STATUS: dict[type[Exception], tuple[int, str]] = {
    core.MalformedRequest: (400, "Validation"),
    core.EmptyRequest: (400, "Empty"),
    core.UnknownModel: (404, "Validation"),
    core.RequestTooLarge: (413, "Validation"),
    core.InvalidRequest: (422, "Validation"),
    core.WrongTask: (424, "Backend"),
    core.Overloaded: (429, "Overloaded"),
    core.ClientGone: (499, "Validation"),
    core.EngineFailed: (500, "Backend"),
    core.ShuttingDown: (503, "Unhealthy"),
    core.EngineDead: (503, "Unhealthy"),
    core.DeadlineExceeded: (504, "Overloaded"),
}
"""The HTTP status and the ``error_type`` of every error a request may get."""

TASK_ROUTES = {"/fill-mask": Task.FILL_MASK, "/embed": Task.EMBED, "/nsp": Task.NSP, "/qa": Task.QA}
"""The task that each route answers with."""

_SERVICE_ROUTES = ("/healthz", "/readyz", "/health", "/info", "/metrics", "/docs", "/openapi.json")

_BODIES: dict[str, type[Body]] = {"/fill-mask": FillMaskBody, "/embed": EmbedBody, "/nsp": NspBody, "/qa": QaBody}

_JSON = "application/json"
_RAW = "application/octet-stream"
_NPY = "application/x-npy"


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """What the API itself refuses; the tasks have limits of their own."""

    max_request_bytes: int
    max_request_texts: int


@dataclass(frozen=True, slots=True)
class Health:
    """What probes ask.

    Attributes:
        dead: why an engine is dead; None while all live.
        draining: whether the server admits nothing more.
    """

    dead: Callable[[], str | None]
    draining: Callable[[], bool]


def create_api(models: Models, metrics: Metrics, health: Health, limits: ApiLimits) -> FastAPI:
    """The application: task routes, probes, metrics and documentation.

    Args:
        models: who answers.
        metrics: what is observed.
        health: what the probes say.
        limits: see `ApiLimits`.
    """
    app = FastAPIOffline(
        title="Cloze",
        version=version("cloze"),
        description="Fill-mask, embeddings, next sentence and question answering by BERT and DistilBERT.",
        redoc_url=None,
        static_url="/docs/assets",
        swagger_ui_oauth2_redirect_url="/docs/oauth2-redirect",
    )
    app.include_router(_task_routes(models, metrics, limits))
    app.include_router(_service_routes(models, metrics, health, limits))
    for kind in (core.ServiceError, HTTPException, Exception):
        app.add_exception_handler(kind, _respond_to_error)
    _document(app)
    app.add_middleware(Connection, known_routes=(*TASK_ROUTES, *_SERVICE_ROUTES), observe=metrics.observe_request)
    return app


# ---- task routes ---------------------------------------------------------------------------------------------------


def _task_routes(models: Models, metrics: Metrics, limits: ApiLimits) -> APIRouter:
    router = APIRouter(tags=["tasks"])

    async def receive(request: Request, kind: type[B]) -> B:
        return _parse(kind, await read_body(request, limits.max_request_bytes))

    def choose(request: Request, name: str | None) -> Pipeline:
        pipeline = models.choose(TASK_ROUTES[request.url.path], name)
        request.scope["cloze.model"] = pipeline.manifest.reference
        return pipeline

    async def answer(request: Request, pipeline: Pipeline, work: Awaitable[Reply[T]]) -> Reply[T]:
        async with client_gone(request):
            reply = await work
        metrics.observe_parts(pipeline.manifest.reference, reply.timings, reply.truncated)
        return reply

    @router.post("/fill-mask", summary="The likeliest tokens at each [MASK]")
    async def fill_mask(request: Request) -> Response:
        body = await receive(request, FillMaskBody)
        texts = _listed(body.inputs, limits)
        asked = body.parameters
        targets = (asked and asked.targets) or []
        pipeline = choose(request, body.model)
        many = isinstance(body.inputs, list)
        work = pipeline.fill_mask(
            texts,
            top_k=5 if asked is None or asked.top_k is None else asked.top_k,
            targets=[targets] if isinstance(targets, str) else targets,
            many=many,
        )
        reply = await answer(request, pipeline, work)
        results = [_masks(masks) for masks in reply.value]
        return _respond(reply, orjson.dumps(results if many else results[0]))

    @router.post("/embed", summary="One vector a text")
    async def embed(request: Request) -> Response:
        body = await receive(request, EmbedBody)
        texts: list[Any] = [body.inputs] if _is_one_text(body.inputs) else body.inputs  # type: ignore[assignment]
        _listed(texts, limits)
        pipeline = choose(request, body.model)
        options = EmbedOptions(
            body.normalize, body.dimensions, body.prompt_name, body.truncate, keep_end=body.truncation_direction == "left"
        )
        work = pipeline.embed(texts, options, many=texts is body.inputs)
        return _respond_vectors(request, await answer(request, pipeline, work))

    @router.post("/nsp", summary="Whether one text follows another")
    async def nsp(request: Request) -> Response:
        body = await receive(request, NspBody)
        inputs = body.inputs
        if isinstance(inputs, Candidates):
            pairs = [(inputs.text, candidate) for candidate in _listed(inputs.candidates, limits)]
            names = [f"inputs.candidates[{index}]" for index in range(len(pairs))]
        else:
            pairs = [(pair.text, pair.next) for pair in _listed(inputs, limits)]
            names = _names(inputs)
        pipeline = choose(request, body.model)
        reply = await answer(request, pipeline, pipeline.nsp(pairs, names))
        scores = reply.value.tolist()
        if isinstance(inputs, Candidates):
            order = sorted(range(len(scores)), key=lambda index: -scores[index][0])
            ranked = [{"index": index, "score": scores[index][0], "text": pairs[index][1]} for index in order]
            return _respond(reply, orjson.dumps(ranked))
        results = [
            [{"label": "IsNext", "score": is_next}, {"label": "NotNext", "score": not_next}] for is_next, not_next in scores
        ]
        return _respond(reply, orjson.dumps(results[0] if isinstance(inputs, Pair) else results))

    @router.post("/qa", summary="The span of a context that answers a question")
    async def qa(request: Request) -> Response:
        body = await receive(request, QaBody)
        pairs = [(pair.question, pair.context) for pair in _listed(body.inputs, limits)]
        given = body.parameters.model_dump(exclude_none=True) if body.parameters else {}
        pipeline = choose(request, body.model)
        work = pipeline.qa(pairs, _names(body.inputs), QaOptions(**given))
        reply = await answer(request, pipeline, work)
        results = [_answers(answers) for answers in reply.value]
        return _respond(reply, orjson.dumps(results[0] if isinstance(body.inputs, QaPair) else results))

    return router


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


def _is_one_text(inputs: object) -> bool:
    return isinstance(inputs, str) or (isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], int))


def _listed(inputs: Any, limits: ApiLimits) -> list[Any]:
    """One or many as a list, neither empty nor too long."""
    texts = inputs if isinstance(inputs, list) else [inputs]
    if not texts:
        raise core.EmptyRequest("inputs is an empty list; it needs at least 1 text")
    if len(texts) > limits.max_request_texts:
        raise core.InvalidRequest(f"inputs has {len(texts)} texts; the limit is {limits.max_request_texts}")
    return texts


def _names(inputs: object) -> list[str]:
    return [f"inputs[{index}]" for index in range(len(inputs))] if isinstance(inputs, list) else ["inputs"]


def _masks(masks: Masks) -> object:
    results = [[asdict(prediction) for prediction in predictions] for predictions in masks]
    return results[0] if len(results) == 1 else results


def _answers(answers: list[QaAnswer]) -> object:
    results = [asdict(answer) for answer in answers]
    return results[0] if len(results) == 1 else results


def _respond(reply: Reply[Any], content: bytes, media_type: str = _JSON, headers: dict[str, str] | None = None) -> Response:
    timings = reply.timings
    total = timings.tokenize_s + timings.queue_s + timings.inference_s
    return Response(
        content,
        media_type=media_type,
        headers={
            "x-compute-time": _milliseconds(total),
            "x-total-time": _milliseconds(total),
            "x-tokenization-time": _milliseconds(timings.tokenize_s),
            "x-queue-time": _milliseconds(timings.queue_s),
            "x-inference-time": _milliseconds(timings.inference_s),
            "x-compute-tokens": str(reply.tokens),
            "x-truncated": str(reply.truncated),
            **({"x-warning": "; ".join(reply.warnings)[:2000]} if reply.warnings else {}),
            **(headers or {}),
        },
    )


def _respond_vectors(request: Request, reply: Reply[core.Float32]) -> Response:
    """Vectors as the client accepts them: JSON, raw little-endian float32 with ``x-shape``, or NumPy's file format."""
    accept = request.headers.get("accept", "")
    vectors = reply.value.astype("<f4", copy=False)
    if _RAW in accept:
        return _respond(reply, vectors.tobytes(), _RAW, {"x-shape": ",".join(map(str, vectors.shape))})
    if _NPY in accept:
        file = io.BytesIO()
        np.save(file, vectors)
        return _respond(reply, file.getvalue(), _NPY)
    return _respond(reply, orjson.dumps(vectors, option=orjson.OPT_SERIALIZE_NUMPY))


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))  # whole numbers, as text-embeddings-inference's clients expect


# ---- service routes ------------------------------------------------------------------------------------------------


def _service_routes(models: Models, metrics: Metrics, health: Health, limits: ApiLimits) -> APIRouter:
    router = APIRouter(tags=["service"])

    def check_alive() -> None:
        if (reason := health.dead()) is not None:
            raise core.EngineDead(f"the engine is dead: {reason}")

    def check_ready() -> None:
        check_alive()
        if health.draining():
            raise core.ShuttingDown("the server is shutting down")

    @router.get("/healthz", summary="Liveness: 503 once an engine is dead")
    async def healthz() -> dict[str, str]:
        check_alive()
        return {"status": "alive"}

    @router.get("/readyz", summary="Readiness: 503 while draining or dead")
    async def readyz() -> dict[str, str]:
        check_ready()
        return {"status": "ready"}

    @router.get("/health", summary="Readiness, as text-embeddings-inference names it")
    async def tei_health() -> Response:
        check_ready()
        return Response()

    @router.get("/info", summary="What is served, and its limits")
    async def info() -> dict[str, Any]:
        return _info(models, limits)

    @router.get("/metrics", summary="For Prometheus")
    async def scrape() -> Response:
        return Response(metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    return router


def _info(models: Models, limits: ApiLimits) -> dict[str, Any]:
    """text-embeddings-inference's fields, of the default model, and a list of all models with their tasks."""
    first = (models.default(Task.EMBED) or models.pipelines[0]).manifest
    return {
        "model_id": first.name,
        "model_sha": first.source.revision,
        "model_dtype": first.graph.precision,
        "model_type": {"embedding": {"pooling": first.embedding.pooling}} if first.embedding else {},
        "max_input_length": first.embedding.max_tokens if first.embedding else first.limits.max_tokens,
        "max_client_batch_size": limits.max_request_texts,
        "max_request_bytes": limits.max_request_bytes,
        "version": version("cloze"),
        "defaults": {task: default.manifest.reference for task in Task if (default := models.default(task))},
        "models": [
            {
                "name": manifest.name,
                "version": manifest.version,
                "tasks": manifest.tasks,
                "family": manifest.architecture.family,
                "parameters": manifest.architecture.parameters,
                "precision": manifest.graph.precision,
                "max_tokens": manifest.limits.max_tokens,
                "embedding": manifest.embedding.model_dump() if manifest.embedding else None,
                "license": manifest.license,
                "source": manifest.source.model_dump(),
            }
            for manifest in (pipeline.manifest for pipeline in models.pipelines)
        ],
    }


# ---- errors and documentation --------------------------------------------------------------------------------------


async def _respond_to_error(request: Request, error: Exception) -> Response:
    """``{"error", "error_type"}`` for every error: ours, the router's, and bugs."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        status, kind = error.status_code, "Validation"
        message = {
            404: f"there is no route {ascii(request.url.path)[:120]}; see /docs",
            405: f"{request.url.path} does not answer {request.method}",
        }.get(status, str(error.detail))
        headers = dict(error.headers or {})
    elif isinstance(error, core.ServiceError):
        status, kind = STATUS[type(error)]
        message = str(error)
        if isinstance(error, core.Overloaded):
            headers["retry-after"] = str(error.retry_after_s)
    else:
        status, kind, message = 500, "Backend", "an internal error; it was logged"
    return Response(orjson.dumps({"error": message, "error_type": kind}), status, headers, _JSON)


def _document(app: FastAPI) -> None:
    """Add the request bodies, which the routes parse themselves, to the OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            _, schemas = models_json_schema(
                [(body, "validation") for body in _BODIES.values()], ref_template="#/components/schemas/{model}"
            )
            document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
            for path, body in _BODIES.items():
                content = {_JSON: {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
                document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


__all__ = ["STATUS", "TASK_ROUTES", "ApiLimits", "Health", "create_api"]
