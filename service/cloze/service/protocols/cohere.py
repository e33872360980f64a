"""Cohere's protocol: ``/v2/embed``, ``/v1/embed`` and ``/v1/tokenize``, with Cohere's errors.

Integers of int8 and uint8 have a scale per vector, which no answer states; see `vector_numbers`.
`/embed` has int8 with its scale.

The two routes differ in the answer to a request that names no type of numbers: that of version 1 is
a list of vectors, and that of version 2 is an object with the list.

Source: the released clients, cohere 5.21 and 7.3, and the OpenAPI document of Cohere's API.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from cloze.service.core import Float32, ServedRequest
from cloze.service.errors import InvalidRequest, Location
from cloze.service.http.routes import Route, RouteDoc
from cloze.service.protocols.protocol import LenientModel, ProtocolContext, TaskRoute, WireProtocol
from cloze.service.protocols.shared_paths import ServedName
from cloze.service.protocols.tei import TokenizerRoute
from cloze.service.protocols.vector_numbers import INTEGERS
from cloze.service.tasks import embed, token_ids
from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.texts import INPUT_TYPES, TRUNCATIONS, Truncate
from cloze.service.tasks.wire import Count, NotEmpty, Text, Texts, WireModel

EmbeddingType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]

_NUMBERS: Final[Mapping[str | None, Callable[[Float32], Any]]] = {
    "float": lambda vectors: vectors,
    "base64": lambda vectors: [b64encode(row).decode() for row in vectors.astype("<f4")],
    **INTEGERS,
}
"""How vectors [n, D] are written."""


class TextContent(WireModel):
    """A text of an input. Cohere's other type is an image."""

    type: Literal["text"]
    text: Text


class EmbedInput(WireModel):
    """An input that has one text."""

    content: Annotated[list[TextContent], Field(min_length=1, max_length=1)]


def _only(field: str, other: str) -> JsonDict:
    """Return the schema of a body that has one of two fields."""
    return {
        "required": [field],
        "properties": {field: {"type": "array"}, other: {"type": "null"}},
    }


class CohereEmbedBody(LenientModel):
    """The body of ``POST /v2/embed`` and ``POST /v1/embed``."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [_only("texts", "inputs"), _only("inputs", "texts")]}
    )

    model: str | None = None
    """a served model, NAME, NAME@VERSION or an alias; null: the default model"""
    input_type: str | None = Field(
        None,
        description="what the texts are for, which chooses the model's own prompt, if it has one: "
        f"{', '.join(INPUT_TYPES)}",
        json_schema_extra={"enum": [*INPUT_TYPES, None]},
    )
    texts: Texts | None = Field(None, description="the texts; leave out inputs")
    inputs: Annotated[list[EmbedInput], NotEmpty] | None = None
    """the texts as objects; leave out texts"""
    images: list[Any] | None = Field(None, description="refused; the models embed texts")
    embedding_types: list[EmbeddingType] | None = Field(
        None,
        description="how the numbers are written; base64 has little-endian float32, int8 and uint8 "
        "have a scale per vector, for cosines, binary and ubinary have signs; the default is "
        "float, which /v1/embed then writes without its name",
    )
    output_dimension: Count | None = Field(None, description="number of leading dimensions to keep")
    truncate: Truncate | None = Field(
        None,
        description="NONE refuses a long text, START and END cut that end; "
        "the default is the model's, usually END",
    )
    priority: int | None = Field(None, description="accepted and ignored")


@dataclass(frozen=True, slots=True)
class ApiVersion:
    """The version of Cohere's API."""

    version: Literal["1", "2"]


@dataclass(frozen=True, slots=True)
class BilledUnits:
    """The number of tokens that the engine ran."""

    input_tokens: int


@dataclass(frozen=True, slots=True)
class Meta:
    """What an answer says of itself."""

    api_version: ApiVersion
    billed_units: BilledUnits


@dataclass(frozen=True, slots=True)
class EmbedByTypeResponse:
    """A response with a vector per text for each type of numbers."""

    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: dict[EmbeddingType, list[list[float] | str]]
    texts: list[str]
    meta: Meta


@dataclass(frozen=True, slots=True)
class EmbedFloatsResponse:
    """The response to ``POST /v1/embed`` without types: a vector per text."""

    id: str
    response_type: Literal["embeddings_floats"]
    embeddings: list[list[float]]
    texts: list[str]
    meta: Meta


@dataclass(frozen=True, slots=True)
class CohereErrorBody:
    """An error in Cohere's shape."""

    message: str


class _Embed(TaskRoute):
    task = embed.TASK
    body = CohereEmbedBody
    names: ClassVar[Mapping[Location, str]] = {
        Location(("dimensions",)): "output_dimension",
        INPUTS: "texts",
    }

    def __init__(self, context: ProtocolContext, version: Literal["1", "2"]) -> None:
        super().__init__(context)
        self._version: Literal["1", "2"] = version
        floats = EmbedFloatsResponse | EmbedByTypeResponse
        self.doc = RouteDoc(
            f"One vector per text, in the shape of version {version} of Cohere's API",
            "Cohere",
            floats if version == "1" else EmbedByTypeResponse,
            examples={
                "Two texts": {
                    "texts": ["What is deep learning?", "A cat sat."],
                    "model": "cloze-bert",
                    "input_type": "search_document",
                    "embedding_types": ["float"],
                }
            },
        )

    def to_call(self, _: ServedRequest, body: CohereEmbedBody) -> tuple[Any, Any]:
        if body.images:
            raise InvalidRequest("are not embedded; send texts", Location(("images",)))
        if (body.texts is None) == (body.inputs is None):
            given = "neither" if body.texts is None else "both"
            raise InvalidRequest(f"the request has {given} of texts and inputs; send one of them")
        parameters = embed.EmbedParameters(
            dimensions=body.output_dimension,
            input_type=body.input_type,
            **TRUNCATIONS[body.truncate],
        )
        return _texts(body), parameters

    def in_body(self, at: Location, body: CohereEmbedBody) -> Location:
        """Return the location in the body, whose texts are in ``texts`` or in ``inputs``."""
        return at if at[:1] == INPUTS and body.texts is None else super().in_body(at, body)

    def respond(self, request: ServedRequest, body: CohereEmbedBody, value: Float32) -> Any:
        identity, texts = request.identity.decode("ascii"), _texts(body)
        meta = Meta(ApiVersion(self._version), BilledUnits(request.tokens))
        if self._version == "1" and not body.embedding_types:
            rows: Any = value
            return EmbedFloatsResponse(identity, "embeddings_floats", rows, texts, meta)
        kinds = dict.fromkeys(body.embedding_types or ("float",))
        vectors = {kind: _NUMBERS[kind](value) for kind in kinds}
        return EmbedByTypeResponse(identity, "embeddings_by_type", vectors, texts, meta)


def _texts(body: CohereEmbedBody) -> list[str]:
    if body.texts is not None:
        return body.texts
    return [given.content[0].text for given in body.inputs or ()]


class CohereTokenizeBody(LenientModel):
    """The body of ``POST /v1/tokenize``."""

    text: Text
    model: ServedName = None


@dataclass(frozen=True, slots=True)
class TokenizeMeta:
    """What an answer says of itself."""

    api_version: ApiVersion


@dataclass(frozen=True, slots=True)
class TokenizeResponse:
    """The tokens of a text, without special tokens."""

    tokens: list[int]
    token_strings: list[str]
    meta: TokenizeMeta


class _Tokenize(TokenizerRoute):
    task = token_ids.TOKENIZE
    body = CohereTokenizeBody
    names: ClassVar[Mapping[Location, str]] = {INPUTS: "text"}
    doc = RouteDoc(
        "The tokens of a text, in Cohere's shape",
        "Cohere",
        TokenizeResponse,
        examples={"One text": {"text": "A house.", "model": "cloze-bert"}},
    )

    def to_call(self, _: ServedRequest, body: CohereTokenizeBody) -> tuple[Any, Any]:
        return body.text, token_ids.TokenizeParameters(add_special_tokens=False)

    def respond(self, _: ServedRequest, __: Any, value: Any) -> TokenizeResponse:
        [tokens] = value
        ids, texts = [token.id for token in tokens], [token.text for token in tokens]
        return TokenizeResponse(ids, texts, TokenizeMeta(ApiVersion("1")))


def _routes(context: ProtocolContext) -> Sequence[Route]:
    embeds = [_Embed(context, "2").bind("/v2/embed"), _Embed(context, "1").bind("/v1/embed")]
    return [*embeds, _Tokenize(context).bind("/v1/tokenize")]


PROTOCOL: Final = WireProtocol(_routes, ("/v2/embed", "/v1/embed", "/v1/tokenize"), CohereErrorBody)
