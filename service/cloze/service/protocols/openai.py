"""OpenAI's protocol: ``/v1/embeddings`` and the lists of models, with OpenAI's errors.

A body of embeddings also has the fields of clients that follow OpenAI: Voyage, Jina and NVIDIA. A
model has a row per name: NAME@VERSION, NAME for the newest version, and each alias. Some clients
refuse a name that has no row.
"""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import unquote

from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.core import ServedRequest
from cloze.service.errors import EmptyRequest, InvalidRequest, Location, UnknownModel
from cloze.service.http.errors import ErrorInfo
from cloze.service.http.routes import RAW, RECORD, Route, RouteDoc
from cloze.service.models.pipeline import Pipeline
from cloze.service.protocols.protocol import (
    ProtocolContext,
    TaskRoute,
    WireProtocol,
    get_route,
    json_response,
)
from cloze.service.protocols.vector_numbers import (
    BYTES,
    INTEGERS,
    METADATA,
    Envelope,
    NumbersBody,
    bytes_answer,
    check_described,
)
from cloze.service.tasks import embed, rerank
from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.texts import (
    INPUT_TYPES,
    TRUNCATIONS,
    PromptTokens,
    TextsOrIds,
    TokenLimit,
    Truncate,
)
from cloze.service.tasks.wire import Count, NotEmpty, Text, WireModel

_PATH: Final = "/v1/embeddings"

_ALIAS: Final = "/embeddings"
"""Another path of ``/v1/embeddings``, which text-embeddings-inference has."""

_MODELS: Final = ("/v1/models", "/models")
"""The paths of the list of models; the servers of vLLM and Infinity have the second."""

Numbers = Literal["float", "base64", "binary", "ubinary", "bytes", "bytes_only"]


class TextInput(WireModel):
    """A text of an input, as Jina's clients send texts beside images, which are refused."""

    text: Text


class OpenAiEmbeddingsBody(NumbersBody):
    """The body of ``POST /v1/embeddings``: OpenAI's fields, and those of clients that follow it.

    Those of Voyage, Jina and NVIDIA have roles of texts, and some names of their own.
    """

    input: TextsOrIds | Annotated[list[TextInput], NotEmpty] = Field(
        description="a text, its token ids, or a list of either; Jina's clients may send a list of "
        "objects with a text",
        examples=["What is deep learning?"],
    )
    model: str | None = None
    """a served model, NAME, NAME@VERSION or an alias; null: the default model"""
    encoding_format: Numbers | Annotated[list[Numbers], Field(max_length=1)] | None = Field(
        None,
        validation_alias=AliasChoices("encoding_format", "encoding_type", "embedding_type"),
        description="base64 encodes little-endian float32, binary and ubinary have the signs of 8 "
        "numbers per integer; vLLM's bytes and bytes_only have no JSON; the default is float; "
        "Jina's names are encoding_type and embedding_type, which may be a list of one",
    )
    dimensions: Count | None = Field(
        None, validation_alias=AliasChoices("dimensions", "output_dimension")
    )
    """number of leading dimensions to keep; Voyage's name is output_dimension"""
    input_type: str | None = Field(
        None,
        validation_alias=AliasChoices("input_type", "task"),
        description="what the texts are for, which chooses the model's own prompt, if it has one: "
        f"{', '.join(INPUT_TYPES)}; Jina's name is task",
    )
    late_chunking: bool | None = Field(
        None,
        description="Jina's field: embed the texts as parts of one text, which joins them by "
        "spaces; the default is false",
    )
    truncate: Truncate | bool | None = Field(
        None,
        description="NONE refuses a long text, START and END cut that end, as in NVIDIA's API; "
        "Jina's clients send false or true; the default is the model's, usually END",
    )
    truncation: bool | None = None
    """Voyage's field: false refuses a long text; the default is true"""
    output_dtype: Literal["float", "int8", "uint8", "binary", "ubinary"] | None = Field(
        None,
        description="Voyage's field: the type of the numbers, also in base64; int8 and uint8 have "
        "a scale per vector, for cosines",
    )
    normalized: bool | None = Field(
        None,
        validation_alias=AliasChoices("normalized", "normalize"),
        description="Jina's field: whether to scale vectors to length 1; the default is the "
        "model's recipe; vLLM's name is normalize",
    )
    truncate_prompt_tokens: TokenLimit = None
    user: str | None = Field(None, description="accepted and ignored")


class EmbedParameters(PromptTokens, embed.EmbedParameters):
    """The parameters of the task, and vLLM's limit."""


@dataclass(frozen=True, slots=True)
class EmbeddingRow:
    """One embedding, as numbers or as base64 of little-endian numbers."""

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
    """The response to ``POST /v1/embeddings``; ``created`` is in seconds since 1970."""

    id: str
    object: Literal["list"]
    created: int
    data: list[EmbeddingRow]
    model: str
    usage: Usage


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


class Embeddings(TaskRoute):
    """The route of embeddings."""

    task = embed.TASK
    body = OpenAiEmbeddingsBody
    names: ClassVar[Mapping[Location, str]] = {INPUTS: "input", Location(("spans",)): "input"}
    doc = RouteDoc(
        "One vector per text, in OpenAI's shape",
        "OpenAI",
        EmbeddingList,
        media_types=(RAW,),
        headers=METADATA,
        examples={
            "Two texts": {"input": ["What is deep learning?", "A cat sat."], "model": "cloze-bert"}
        },
    )

    def to_call(self, _: ServedRequest, body: OpenAiEmbeddingsBody) -> tuple[Any, Any]:
        """Return the texts, and the parameters by the fields of all clients."""
        if isinstance(body.truncate, bool):
            truncation: dict[str, Any] = {"truncate": body.truncate}
        else:
            truncation = {"truncate": body.truncation} | TRUNCATIONS[body.truncate]
        if (form := _form(body)) in BYTES and body.output_dtype in INTEGERS:
            problem = f"is {form}, whose numbers have the type embed_dtype; leave out output_dtype"
            raise InvalidRequest(problem, Location(("encoding_format",)))
        check_described(form, body.input)
        given: Any = body.input
        spans = None
        if isinstance(given, list) and given and isinstance(given[0], TextInput):
            given = [part.text for part in given]
        if body.late_chunking:
            given, spans = _joined(given)
        parameters = EmbedParameters(
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            dimensions=body.dimensions,
            input_type=body.input_type,
            normalize=body.normalized,
            spans=spans,
            **truncation,
        )
        return given, parameters

    def respond(self, request: ServedRequest, body: OpenAiEmbeddingsBody, value: Any) -> Any:
        """Return the vectors in OpenAI's shape, or as vLLM's bytes."""
        identity = f"embd-{request.identity.decode('ascii')}"
        created = int(self.context.limits.clock.wall())
        model = request.model if body.model is None else body.model
        usage = Usage(request.tokens, request.tokens)
        form = _form(body)
        if form in BYTES:
            return bytes_answer(body, form, value, Envelope(identity, created, model, usage))
        kind = form if form in INTEGERS else body.output_dtype
        vectors: Iterable[Any] = value
        if kind in INTEGERS:
            vectors = INTEGERS[kind](value)
            if form == "base64":
                vectors = [b64encode(vector).decode() for vector in vectors]
        elif form == "base64":
            vectors = map(body.base64, value)
        rows = [EmbeddingRow("embedding", index, vector) for index, vector in enumerate(vectors)]
        return EmbeddingList(identity, "list", created, rows, model, usage)


def _form(body: OpenAiEmbeddingsBody) -> Numbers | None:
    """Return how the numbers are written; None: as JSON."""
    form = body.encoding_format
    return next(iter(form), None) if isinstance(form, list) else form


def _joined(texts: Any) -> tuple[str, list[tuple[int, int]]]:
    """Return texts as one text, and the (start, end) of each in it, in characters."""
    at = Location(("input",))
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("must be a list of texts, as late_chunking is true", at)
    if "" in texts:
        raise EmptyRequest("is empty; it needs at least 1 character", at.below(texts.index("")))
    ends = [end + index for index, end in enumerate(accumulate(map(len, texts)))]
    starts = [end - len(text) for text, end in zip(texts, ends, strict=True)]
    return " ".join(texts), list(zip(starts, ends, strict=True))


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A name of a served model; ``created`` is in seconds since 1970.

    ``embedding_space`` names the space of the vectors of `/v1/embeddings`; null for a model that
    does not embed. ``embedding_spaces`` has the names of all its vectors by task. Mistral's clients
    read a row by its ``type``, and need ``capabilities``, here none of those that they list.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    embedding_space: str | None
    embedding_spaces: dict[str, str | None]
    type: Literal["base"]
    capabilities: dict[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus(ModelRow):
    """One served model, with the fields of KServe's V1 protocol.

    Xinference's clients choose by `model_type` how to ask the model; it is null for other models.
    """

    name: str
    model_type: Literal["embedding", "rerank"] | None
    ready: Literal[True] = True


@dataclass(frozen=True, slots=True)
class ModelList:
    """The response to ``GET /v1/models``."""

    object: Literal["list"]
    data: list[ModelRow]


def _routes(context: ProtocolContext) -> Sequence[Route]:
    embeddings, get = Embeddings(context), partial(get_route, tag="OpenAI")
    models, model = partial(_models, context), partial(_model, context)
    names, about = "The names of served models", "A served model"
    return [
        *(embeddings.bind(path) for path in (_PATH, _ALIAS)),
        *(get(path, models, f"{names}, in OpenAI's shape", ModelList) for path in _MODELS),
        get(f"{_MODELS[0]}/{{model}}", model, f"{about}, in OpenAI's shape", ModelStatus, 404, 503),
    ]


async def _models(context: ProtocolContext, request: Request) -> Response:
    models = context.models_of(request.scope[RECORD])
    rows = [_row(p, name) for p in models.pipelines for name in models.names_of[p]]
    return json_response(ModelList("list", rows))


async def _model(context: ProtocolContext, request: Request) -> Response:
    models = context.models_of(request.scope[RECORD])
    pipeline = models.named(unquote(request.path_params["model"]))
    if (error := context.state.why_unready()) is not None:
        raise error
    row = _row(pipeline, pipeline.reference)
    kind: Literal["embedding", "rerank"] | None = None
    if embed.TASK.name in models.tasks_of[pipeline]:
        kind = "embedding"
    elif rerank.scorer_of(pipeline.manifest) == "classifier":
        kind = "rerank"
    status = ModelStatus(**asdict(row), name=pipeline.manifest.name, model_type=kind)
    return json_response(status)


def _row(pipeline: Pipeline, name: str) -> ModelRow:
    created = int(pipeline.manifest.created.timestamp())
    spaces = pipeline.own_spaces()
    own = spaces.get(embed.TASK.name)
    return ModelRow(name, "model", created, "cloze", own, spaces, "base", {})


PROTOCOL: Final = WireProtocol(
    _routes, ("/v1/", _PATH, _ALIAS, _MODELS[1]), OpenAiErrorBody, error_body
)
