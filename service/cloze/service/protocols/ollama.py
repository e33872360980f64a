"""Ollama's protocol: ``/api/embed`` and ``/api/embeddings``, with Ollama's errors.

Names of models may end in ``:latest``; see `Models.named`. The routes that generate, pull or delete
do not exist. ``options`` and ``keep_alive`` are ignored, and named in ``x-warning``.

Source: the released clients, ollama 0.6 for Python and for Node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.core import ServedRequest
from cloze.service.errors import EmptyRequest, Location
from cloze.service.http.routes import RECORD, Handler, Route, RouteDoc
from cloze.service.protocols.protocol import (
    LenientModel,
    ProtocolContext,
    TaskRoute,
    WireProtocol,
    json_response,
)
from cloze.service.tasks import embed
from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.wire import CountOrZero, Text

MODEL: Final = "a served model, NAME, NAME@VERSION or an alias, also with :latest behind"
"""Describes the field ``model``."""


class OllamaEmbedBody(LenientModel):
    """The body of ``POST /api/embed``."""

    input: str | list[Text]
    """a text, or a list of texts; an empty one has no vector"""
    model: str | None = Field(None, description=f"{MODEL}; null: the default model")
    truncate: bool | None = None
    """false refuses a long text; the default is true, which cuts its end"""
    dimensions: CountOrZero | None = None
    """number of leading dimensions to keep; 0: all"""


class OllamaEmbeddingsBody(LenientModel):
    """The body of ``POST /api/embeddings``, the older route."""

    prompt: str = Field(description="the text; an empty one has no vector")
    model: str | None = Field(None, description=f"{MODEL}; null: the default model")


@dataclass(frozen=True, slots=True)
class OllamaEmbedResponse:
    """The response to ``POST /api/embed``: a vector per text, and durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


@dataclass(frozen=True, slots=True)
class OllamaEmbeddingsResponse:
    """The response to ``POST /api/embeddings``."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class OllamaErrorBody:
    """An error in Ollama's shape."""

    error: str


_doc: Final = partial(RouteDoc, tag="Ollama")


class _Embed(TaskRoute):
    task = embed.TASK
    body = OllamaEmbedBody
    names: ClassVar[Mapping[Location, str]] = {INPUTS: "input"}
    doc = _doc(
        "One vector per text, in Ollama's shape",
        result=OllamaEmbedResponse,
        examples={"Two texts": {"model": "cloze-bert", "input": ["A cat sat.", "A dog sleeps."]}},
    )

    def to_call(self, _: ServedRequest, body: OllamaEmbedBody) -> tuple[Any, Any]:
        dimensions = body.dimensions or None
        return body.input, embed.EmbedParameters(truncate=body.truncate, dimensions=dimensions)

    def respond(self, request: ServedRequest, body: OllamaEmbedBody, value: Any) -> Any:
        seconds = request.tokenize_s + request.queue_s + request.inference_s
        name = request.model if body.model is None else body.model
        return OllamaEmbedResponse(name, value, int(1e9 * seconds), 0, request.tokens)


class _Embeddings(TaskRoute):
    task = embed.TASK
    body = OllamaEmbeddingsBody
    names: ClassVar[Mapping[Location, str]] = {INPUTS: "prompt"}
    doc = _doc(
        "The vector of a text, in the shape of Ollama's older route",
        result=OllamaEmbeddingsResponse,
        examples={"One text": {"model": "cloze-bert", "prompt": "A cat sat."}},
    )

    def to_call(self, _: ServedRequest, body: OllamaEmbeddingsBody) -> tuple[Any, Any]:
        return body.prompt, embed.EmbedParameters()

    def respond(self, _: ServedRequest, __: OllamaEmbeddingsBody, value: Any) -> Any:
        return OllamaEmbeddingsResponse(value[0])


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the routes that embed texts for Ollama's clients."""
    embed_route = _Embed(context).bind("/api/embed")
    older_route = _Embeddings(context).bind("/api/embeddings")
    empty = OllamaEmbeddingsResponse([])
    return [
        replace(embed_route, handler=partial(_embed_or_preload, embed_route.handler, None)),
        replace(older_route, handler=partial(_embed_or_preload, older_route.handler, empty)),
    ]


async def _embed_or_preload(
    embed_texts: Handler, empty: OllamaEmbeddingsResponse | None, request: Request
) -> Response:
    """Answer a request; one without a text, which loads a model in Ollama, has no vectors."""
    try:
        return await embed_texts(request)
    except EmptyRequest as error:
        if error.at is None or len(error.at) != 1:  # an empty text among others
            raise
        model = request.scope[RECORD].model
        return json_response(empty or OllamaEmbedResponse(model, [], 0, 0, 0))


PROTOCOL: Final = WireProtocol(routes, ("/api/",), OllamaErrorBody)
