"""OpenAI's protocol: ``/v1/embeddings`` and ``/v1/models``, with OpenAI's errors."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal
from urllib.parse import unquote

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cloze.model_store import Manifest
from cloze.service.core import UnknownModel
from cloze.service.http.errors import ERROR_STATUSES, ErrorInfo, without_422
from cloze.service.http.routes import BytesResponse, Route, RouteDoc
from cloze.service.pipeline import TaskResult
from cloze.service.protocols.protocol import ProtocolContext, WireProtocol, json_response
from cloze.service.protocols.task_route import TIMING_HEADERS, TaskRoute
from cloze.service.tasks import TaskCall, embed
from cloze.service.tasks.task import Count, WireModel
from cloze.service.tasks.texts import TextsOrIds

_ALIAS: Final = "/embeddings"
"""Another path of ``/v1/embeddings``, which text-embeddings-inference has."""


class OpenAiEmbeddingsBody(WireModel):
    """The body of ``POST /v1/embeddings``."""

    input: TextsOrIds = Field(
        description="a text, its token ids, or a list of either",
        examples=["What is deep learning?"],
    )
    model: str = Field(description="a served model, NAME or NAME@VERSION")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 encodes little-endian float32; the default is float"
    )
    dimensions: Count | None = Field(None, description="number of leading dimensions to keep")
    user: str | None = Field(None, description="accepted and ignored")


@dataclass(frozen=True, slots=True)
class EmbeddingRow:
    """One embedding, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


@dataclass(frozen=True, slots=True)
class Usage:
    """The number of tokens that the engine ran."""

    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class EmbeddingList:
    """The response to ``POST /v1/embeddings``."""

    object: Literal["list"]
    data: list[EmbeddingRow]
    model: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One served model; ``created`` is in seconds since 1970."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


@dataclass(frozen=True, slots=True)
class ModelList:
    """The response to ``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelRow]


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """The details of an error."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """An error in OpenAI's shape."""

    error: ErrorDetails


def write_error(error: ErrorInfo) -> tuple[int, Mapping[str, Any]]:
    """Return the status and the body of an error. OpenAI uses status 400 instead of 422."""
    status = without_422(error.status)
    code = "model_not_found" if isinstance(error.error, UnknownModel) else None
    kind = _error_type(status)
    return status, {"error": {"message": error.message, "type": kind, "param": None, "code": code}}


def _error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _to_call(body: OpenAiEmbeddingsBody) -> TaskCall:
    return TaskCall(body.input, embed.EmbedParameters(dimensions=body.dimensions))


def _respond(_: Request, body: OpenAiEmbeddingsBody, result: TaskResult) -> BytesResponse:
    vectors: Iterable[object] = result.value.astype("<f4", copy=False)
    if body.encoding_format == "base64":
        vectors = [b64encode(vector).decode() for vector in result.value.astype("<f4", copy=False)]
    answer = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": vector}
            for index, vector in enumerate(vectors)
        ],
        "model": body.model,
        "usage": {"prompt_tokens": result.tokens, "total_tokens": result.tokens},
    }
    return json_response(answer)


_EMBEDDINGS: Final = TaskRoute(
    path="/v1/embeddings",
    task=embed.TASK,
    body=OpenAiEmbeddingsBody,
    to_call=_to_call,
    respond=_respond,
    doc=RouteDoc(
        summary="One vector per text, in OpenAI's shape",
        tag="OpenAI",
        result=EmbeddingList,
        error_body=ErrorBody,
        body=OpenAiEmbeddingsBody,
        examples={
            "Two texts": {"input": ["What is deep learning?", "A cat sat."], "model": "cloze-bert"}
        },
        headers=TIMING_HEADERS,
        errors=tuple(sorted(set(map(without_422, ERROR_STATUSES)))),
    ),
    names={("inputs",): "input"},
)


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the routes for OpenAI's clients."""

    async def models(_: Request) -> Response:
        rows = [_row(pipeline.manifest) for pipeline in context.models.pipelines]
        return json_response(ModelList("list", rows))

    async def model(request: Request) -> Response:
        pipeline = context.models.named(unquote(request.path_params["model"]))
        return json_response(_row(pipeline.manifest))

    doc = RouteDoc("The served models, in OpenAI's shape", "OpenAI", ModelList, ErrorBody)
    one = RouteDoc(
        "A served model, in OpenAI's shape", "OpenAI", ModelRow, ErrorBody, errors=(404,)
    )
    return [
        _EMBEDDINGS.bind(context),
        replace(_EMBEDDINGS, path=_ALIAS).bind(context),
        Route("GET", "/v1/models", models, doc),
        Route("GET", "/v1/models/{model}", model, one),
    ]


def _row(manifest: Manifest) -> ModelRow:
    return ModelRow(manifest.reference, "model", int(manifest.created.timestamp()), "cloze")


PROTOCOL: Final = WireProtocol("openai", ("/v1/", _ALIAS), routes, write_error)
