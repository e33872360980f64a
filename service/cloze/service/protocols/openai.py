"""OpenAI's protocol: ``/v1/embeddings``, with OpenAI's errors.

Its body also has the fields of clients that follow it, those of Voyage, Jina and NVIDIA.
"""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AliasChoices, Field

from cloze.service.core import ServedRequest
from cloze.service.errors import EmptyRequest, InvalidRequest, Location, UnknownModel
from cloze.service.http.errors import ErrorInfo
from cloze.service.http.routes import RAW, Route, RouteDoc
from cloze.service.protocols.protocol import (
    ProtocolContext,
    TaskRoute,
    WireProtocol,
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
from cloze.service.tasks import embed
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


class _EmbedParameters(PromptTokens, embed.EmbedParameters):
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


class _Embeddings(TaskRoute):
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
        parameters = _EmbedParameters(
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            dimensions=body.dimensions,
            input_type=body.input_type,
            normalize=body.normalized,
            spans=spans,
            **truncation,
        )
        return given, parameters

    def respond(self, request: ServedRequest, body: OpenAiEmbeddingsBody, value: Any) -> Any:
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


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the routes for OpenAI's clients."""
    embeddings = _Embeddings(context)
    return [embeddings.bind(_PATH), embeddings.bind(_ALIAS)]


def embeddings_route(context: ProtocolContext) -> TaskRoute:
    """Return the route of embeddings, for a path of another protocol."""
    return _Embeddings(context)


PROTOCOL: Final = WireProtocol(
    routes, ("/v1/", _PATH, _ALIAS, "/models"), OpenAiErrorBody, error_body
)
