"""Weaviate's protocol: ``/vectors`` of the module text2vec-transformers, and its probes.

The module sends one text per request, with ``task_type`` query or passage. Two addresses, one for
each, may both be this server.

Source: the module's client, and the server that Weaviate publishes for the module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cloze.model_store.heads import Pooling
from cloze.service import errors
from cloze.service.core import ServedRequest
from cloze.service.http.routes import RECORD, Route, RouteDoc
from cloze.service.protocols.protocol import (
    LenientModel,
    ProtocolContext,
    TaskRoute,
    WireProtocol,
    answer_probe,
    get_route,
    ignored_fields,
    json_response,
)
from cloze.service.tasks import embed
from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.texts import ROLE_WORDS
from cloze.service.tasks.wire import Count, Text, Texts

_POOLINGS: Final = {"masked_mean": Pooling.MEAN, "cls": Pooling.CLS}
"""Weaviate's words for poolings."""

_STRATEGY: Final = errors.Location(("config", "pooling_strategy"))


class VectorsConfig(LenientModel):
    """How the texts of `VectorsBody` become vectors; an empty text stands for no value."""

    pooling_strategy: str | None = None
    """masked_mean or cls. Weaviate sends masked_mean unless a collection says otherwise. Where that
    is not the model's own pooling, it is ignored and named in `x-warning`."""
    task_type: str | None = Field(None, json_schema_extra={"enum": [*ROLE_WORDS, "", None]})
    """what the texts are for, query or passage, which chooses the model's own prompt"""
    dimensions: Count | None = None
    """number of leading dimensions to keep"""


class VectorsBody(LenientModel):
    """The body of ``POST /vectors``: one of ``text`` and ``texts``.

    Weaviate's body has fields of the answer too, which are not read.
    """

    text: Text | None = Field(None, description="a text", examples=["A cat sat."])
    texts: Texts | None = Field(None, description="several texts")
    dims: Any = Field(None, description="not read")
    vector: Any = Field(None, description="not read")
    error: Any = Field(None, description="not read")
    config: VectorsConfig | None = None
    model: str | None = Field(None, description="a served model, NAME or NAME@VERSION")


@dataclass(frozen=True, slots=True)
class TextVector:
    """The response for one text."""

    text: str
    vector: list[float]
    dims: int


@dataclass(frozen=True, slots=True)
class TextVectors:
    """The response for several texts."""

    vectors: list[list[float]]
    dims: int


@dataclass(frozen=True, slots=True)
class WeaviateErrorBody:
    """An error in Weaviate's shape."""

    error: str


class _Vectors(TaskRoute):
    task = embed.TASK
    body = VectorsBody
    doc = RouteDoc(
        "One vector per text, in Weaviate's shape",
        "Weaviate",
        TextVector | TextVectors,
        examples={
            "One text": {"text": "A cat sat.", "config": {"task_type": "passage"}},
            "Two texts": {"texts": ["A cat sat.", "A dog ran."]},
        },
    )

    def to_call(self, request: ServedRequest, body: VectorsBody) -> tuple[Any, Any]:
        if (body.text is None) == (body.texts is None):
            raise errors.InvalidRequest("the body needs one of text and texts")
        config = body.config or VectorsConfig()
        strategy = config.pooling_strategy
        if strategy and strategy not in _POOLINGS:
            problem = f"is {errors.quoted(strategy)}; there are {', '.join(_POOLINGS)}"
            raise errors.InvalidRequest(problem, _STRATEGY)
        cls = strategy == "cls" and not self._is_own(request, strategy)
        parameters = embed.EmbedParameters(
            input_type=config.task_type or None,
            dimensions=config.dimensions,
            pooling="cls" if cls else None,
        )
        return body.text if body.texts is None else body.texts, parameters

    def in_body(self, at: errors.Location, body: VectorsBody) -> errors.Location:
        if at[:1] == INPUTS:
            return errors.Location(("text" if body.texts is None else "texts", *at[1:]))
        return errors.Location(("config", self._names.get(str(at[0]), str(at[0])), *at[1:]))

    _names: ClassVar = {"input_type": "task_type", "pooling": "pooling_strategy"}

    def respond(self, request: ServedRequest, body: VectorsBody, value: Any) -> Any:
        config = body.config or VectorsConfig()
        ignored = []
        if config.pooling_strategy == "masked_mean" and not self._is_own(request, "masked_mean"):
            ignored.append(f"ignored pooling_strategy: {request.model} has a pooling of its own")
        if config.model_extra:
            ignored.append(ignored_fields(config, config))
        request.warnings = (*ignored, *request.warnings)
        if body.texts is None:
            return TextVector(str(body.text), value[0], value.shape[1])
        return TextVectors(value, value.shape[1])

    def _is_own(self, request: ServedRequest, strategy: str) -> bool:
        """Return whether a strategy is the pooling of the model that answers."""
        options = self.context.models.named(request.model).manifest.embedding
        return options is not None and options.poolings == (_POOLINGS[strategy],)


def _routes(context: ProtocolContext) -> Sequence[Route]:
    async def meta(request: Request) -> Response:
        models = context.models_of(request.scope[RECORD])
        if (default := models.default(embed.TASK)) is None:
            return json_response({})
        manifest = default.manifest
        recipe = default.context.own_vectors
        return json_response(
            {
                "model": default.reference,
                "family": manifest.architecture.family,
                "max_tokens": manifest.limits.max_tokens,
                "dimensions": recipe.dimensions if recipe else None,
                "embedding_space": default.embedding_space(recipe),
            }
        )

    get = partial(get_route, tag="Weaviate")
    live, ready = (
        partial(answer_probe, problem, None, status=204)
        for problem in (context.state.why_restart, context.state.why_unready)
    )
    return [
        _Vectors(context).bind("/vectors"),
        get("/meta", meta, "The default model of embeddings, for Weaviate", dict[str, Any]),
        get("/.well-known/live", live, "Liveness, for Weaviate", None, 503, status=204),
        get("/.well-known/ready", ready, "Readiness, for Weaviate", None, 503, status=204),
    ]


PROTOCOL: Final = WireProtocol(
    _routes, ("/vectors", "/meta", "/.well-known/"), WeaviateErrorBody, has_422=True
)
