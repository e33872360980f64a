"""OpenAI's protocol: ``/v1/embeddings`` and ``/v1/models``, with OpenAI's errors."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, Final, Literal
from urllib.parse import unquote

from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.core import ServedRequest
from cloze.service.errors import Location, UnknownModel
from cloze.service.http.errors import ErrorInfo
from cloze.service.http.routes import RECORD, Route, RouteDoc
from cloze.service.models.pipeline import Pipeline
from cloze.service.protocols.protocol import (
    STATUSES_WITHOUT_422,
    ProtocolContext,
    TaskRoute,
    WireProtocol,
    get_route,
    json_response,
)
from cloze.service.tasks import embed
from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.texts import ROLE_WORDS, TRUNCATIONS, TextsOrIds, Truncate
from cloze.service.tasks.wire import Count, WireModel

_ALIAS: Final = "/embeddings"
"""Another path of ``/v1/embeddings``, which text-embeddings-inference has."""


class OpenAiEmbeddingsBody(WireModel):
    """The body of ``POST /v1/embeddings``: OpenAI's fields, and those of clients that follow it.

    Those of Voyage, Jina and NVIDIA have roles of texts, and some names of their own.
    """

    input: TextsOrIds = Field(
        description="a text, its token ids, or a list of either",
        examples=["What is deep learning?"],
    )
    model: str = Field(description="a served model, NAME or NAME@VERSION")
    encoding_format: Literal["float", "base64"] | None = Field(
        None,
        validation_alias=AliasChoices("encoding_format", "encoding_type", "embedding_type"),
        description="base64 encodes little-endian float32; the default is float; Jina's names are "
        "encoding_type and embedding_type",
    )
    dimensions: Count | None = Field(
        None,
        validation_alias=AliasChoices("dimensions", "output_dimension"),
        description="number of leading dimensions to keep; Voyage's name is output_dimension",
    )
    input_type: str | None = Field(
        None,
        validation_alias=AliasChoices("input_type", "task"),
        description="what the texts are for, which chooses the model's own prompt: "
        f"{', '.join(ROLE_WORDS)}; Jina's name is task",
    )
    truncate: Truncate | bool | None = Field(
        None,
        description="NONE refuses a long text, START and END cut that end, as in NVIDIA's API; "
        "Jina's clients send false or true; the default is the model's, usually END",
    )
    truncation: bool | None = Field(
        None, description="Voyage's field: false refuses a long text; the default is true"
    )
    output_dtype: Literal["float"] | None = Field(None, description="Voyage's field")
    normalized: bool | None = Field(
        None,
        description="Jina's field: whether to scale vectors to length 1; the default is the "
        "model's recipe",
    )
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
    """One served model; ``created`` is in seconds since 1970.

    ``embedding_space`` names the space of the vectors of `/v1/embeddings`; null for a model that
    does not embed. ``embedding_spaces`` has the names of all its vectors by task.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    embedding_space: str | None
    embedding_spaces: dict[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus(ModelRow):
    """One served model, with the fields of KServe's V1 protocol."""

    name: str
    ready: Literal[True] = True


@dataclass(frozen=True, slots=True)
class ModelList:
    """The response to ``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelRow]


ErrorType = Literal["invalid_request_error", "rate_limit_error", "server_error"]


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """The details of an error."""

    message: str
    type: ErrorType
    param: str | None
    code: str | None


@dataclass(frozen=True, slots=True)
class OpenAiErrorBody:
    """An error in OpenAI's shape.

    ``detail`` has the message for Voyage's and Jina's clients. Without it, Voyage's does not see
    that a refusal is one, and does not ask again.
    """

    error: ErrorDetails
    detail: str


def error_body(error: ErrorInfo) -> OpenAiErrorBody:
    """Return the body of an error."""
    code = error.code if error.code == UnknownModel.code else None
    kind: ErrorType = "invalid_request_error" if error.status < 500 else "server_error"
    kind = "rate_limit_error" if error.status == 429 else kind
    return OpenAiErrorBody(ErrorDetails(error.message, kind, None, code), error.message)


class _Embeddings(TaskRoute):
    task = embed.TASK
    body = OpenAiEmbeddingsBody
    names: ClassVar[Mapping[Location, str]] = {INPUTS: "input"}
    doc = RouteDoc(
        "One vector per text, in OpenAI's shape",
        "OpenAI",
        EmbeddingList,
        OpenAiErrorBody,
        examples={
            "Two texts": {"input": ["What is deep learning?", "A cat sat."], "model": "cloze-bert"}
        },
        errors=STATUSES_WITHOUT_422,
    )

    def to_call(self, _: ServedRequest, body: OpenAiEmbeddingsBody) -> tuple[Any, Any]:
        if isinstance(body.truncate, bool):
            truncation: dict[str, Any] = {"truncate": body.truncate}
        else:
            truncation = {"truncate": body.truncation} | TRUNCATIONS[body.truncate]
        parameters = embed.EmbedParameters(
            dimensions=body.dimensions,
            input_type=body.input_type,
            normalize=body.normalized,
            **truncation,
        )
        return body.input, parameters

    def respond(self, request: ServedRequest, body: OpenAiEmbeddingsBody, value: Any) -> Any:
        vectors: Iterable[Any] = value.astype("<f4", copy=False)
        if body.encoding_format == "base64":
            vectors = [b64encode(vector).decode() for vector in vectors]
        rows = [EmbeddingRow("embedding", index, vector) for index, vector in enumerate(vectors)]
        usage = Usage(request.tokens, request.tokens)
        return EmbeddingList("list", rows, body.model, usage)


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the routes for OpenAI's clients."""

    async def models(request: Request) -> Response:
        rows = [_row(pipeline) for pipeline in context.models_of(request.scope[RECORD]).pipelines]
        return json_response(ModelList("list", rows))

    async def model(request: Request) -> Response:
        models = context.models_of(request.scope[RECORD])
        pipeline = models.named(unquote(request.path_params["model"]))
        if (error := context.state.why_unready()) is not None:
            raise error
        return json_response(ModelStatus(**asdict(_row(pipeline)), name=pipeline.manifest.name))

    get = partial(get_route, tag="OpenAI", error_body=OpenAiErrorBody)
    embeddings = _Embeddings(context)
    return [
        embeddings.bind("/v1/embeddings"),
        embeddings.bind(_ALIAS),
        get("/v1/models", models, "The served models, in OpenAI's shape", ModelList),
        get(
            "/v1/models/{model}", model, "A served model, in OpenAI's shape", ModelStatus, 404, 503
        ),
    ]


def embeddings_route(context: ProtocolContext) -> TaskRoute:
    """Return the route of embeddings, for a path of another protocol."""
    return _Embeddings(context)


def _row(pipeline: Pipeline) -> ModelRow:
    created = int(pipeline.manifest.created.timestamp())
    spaces = pipeline.own_spaces()
    own = spaces.get(embed.TASK.name)
    return ModelRow(pipeline.reference, "model", created, "cloze", own, spaces)


PROTOCOL: Final = WireProtocol(("/v1/", _ALIAS), routes, error_body)
