"""Ollama's protocol: embeddings and the models that are served, with Ollama's errors.

Names of models may end in ``:latest``; see `Models.named`. The list of models has NAME of the
newest version of each model, and its aliases. The routes that generate, pull or delete do not
exist. ``options`` and ``keep_alive`` are ignored, and named in ``x-warning``.

Source: the released clients, ollama 0.6 for Python and for Node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar, Final

from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from cloze.model_store.installation import DISTRIBUTION
from cloze.service.core import ServedRequest
from cloze.service.errors import EmptyRequest, Location
from cloze.service.http.body import SHORT_BYTES, load, validate
from cloze.service.http.routes import RECORD, Handler, Route, RouteDoc
from cloze.service.models.pipeline import Pipeline
from cloze.service.protocols.protocol import (
    LenientModel,
    ProtocolContext,
    TaskRoute,
    WireProtocol,
    gate_models,
    get_route,
    json_response,
)
from cloze.service.tasks import embed
from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.wire import CountOrZero, Text

MODEL: Final = "a served model, NAME, NAME@VERSION or an alias, also with :latest behind"
"""Describes the field ``model``."""

_NEVER: Final = "9999-12-31T23:59:59+00:00"


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


class OllamaShowBody(LenientModel):
    """The body of ``POST /api/show``."""

    model: str = Field(validation_alias=AliasChoices("model", "name"), description=MODEL)


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """The family and the size of a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


@dataclass(frozen=True, slots=True)
class ModelTag:
    """A name of a served model; ``size`` is in bytes."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningModel(ModelTag):
    """A model in memory; ``context_length`` is in tokens. No model is unloaded."""

    expires_at: str
    size_vram: int
    context_length: int


@dataclass(frozen=True, slots=True)
class RunningModelList:
    """The response to ``GET /api/ps``."""

    models: list[RunningModel]


@dataclass(frozen=True, slots=True)
class OllamaModelList:
    """The response to ``GET /api/tags``."""

    models: list[ModelTag]


@dataclass(frozen=True, slots=True)
class OllamaShowResponse:
    """The response to ``POST /api/show``: what is known of a model."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


def _routes(context: ProtocolContext) -> Sequence[Route]:
    embed_route = _Embed(context).bind("/api/embed")
    older_route = _Embeddings(context).bind("/api/embeddings")
    empty, get = OllamaEmbeddingsResponse([]), partial(get_route, tag="Ollama")
    about = {"version": version(DISTRIBUTION)}

    async def answer_version(_: Request) -> Response:
        return json_response(about)

    show_doc = _doc(
        "What is known of a served model, in Ollama's shape",
        result=OllamaShowResponse,
        body=OllamaShowBody,
        examples={"A model": {"model": "cloze-bert"}},
    )
    tags, running = partial(_tags, context), partial(_running, context)
    every_model = gate_models(context.models.pipelines)
    return [
        replace(embed_route, handler=partial(_embed_or_preload, embed_route.handler, None)),
        replace(older_route, handler=partial(_embed_or_preload, older_route.handler, empty)),
        get("/api/tags", tags, "The names of served models, in Ollama's shape", OllamaModelList),
        get("/api/ps", running, "The models in memory, in Ollama's shape", RunningModelList),
        Route("POST", "/api/show", partial(_show, context), show_doc, every_model),
        get("/api/version", answer_version, "The version of the server", dict[str, str]),
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


async def _tags(context: ProtocolContext, request: Request) -> Response:
    models = context.models_of(request.scope[RECORD])
    rows = [_tag(p, name) for p in models.pipelines for name in models.names_of[p][1:]]
    return json_response(OllamaModelList(rows))


async def _running(context: ProtocolContext, request: Request) -> Response:
    models = context.models_of(request.scope[RECORD])
    return json_response(RunningModelList([_in_memory(p) for p in models.pipelines]))


async def _show(context: ProtocolContext, http_request: Request) -> Response:
    with context.limits.request(http_request) as request:
        data = await context.limits.read(http_request, SHORT_BYTES)
        body = validate(OllamaShowBody, load(data, context.body_limits))
        models = context.models_of(request)
        pipeline = models.named(body.model)
        manifest = pipeline.manifest
        architecture = manifest.architecture
        family, longest = architecture.family, manifest.limits.max_tokens
        info: dict[str, Any] = {
            "general.architecture": family,
            "general.parameter_count": architecture.parameters,
            f"{family}.block_count": architecture.layers,
            f"{family}.context_length": longest,
        }
        if (own := pipeline.context.own_vectors) is not None:
            info[f"{family}.embedding_length"] = own.dimensions
        embeds = embed.TASK.name in models.tasks_of[pipeline]
        return json_response(
            OllamaShowResponse(
                license=manifest.license or "",
                modelfile="",
                parameters="",
                template="",
                details=_details(pipeline),
                model_info=info,
                capabilities=["embedding"] if embeds else [],
                modified_at=manifest.created.isoformat(),
            )
        )


def _tag(pipeline: Pipeline, name: str) -> ModelTag:
    """Return the row of a name, which Ollama's clients expect to have a colon."""
    manifest = pipeline.manifest
    tagged = name if ":" in name else f"{name}:latest"
    size = sum(file.size for file in manifest.files.values())
    created = manifest.created.isoformat()
    return ModelTag(tagged, tagged, created, size, manifest.digest, _details(pipeline))


def _in_memory(pipeline: Pipeline) -> RunningModel:
    tag = _tag(pipeline, pipeline.manifest.name)
    longest = pipeline.manifest.limits.max_tokens
    return RunningModel(**asdict(tag), expires_at=_NEVER, size_vram=0, context_length=longest)


def _details(pipeline: Pipeline) -> ModelDetails:
    architecture = pipeline.manifest.architecture
    family, size = architecture.family, f"{architecture.parameters / 1e6:.2f}M"
    precision = pipeline.model.precision().upper()
    return ModelDetails("", "onnx", family, [family], size, precision)


PROTOCOL: Final = WireProtocol(_routes, ("/api/",), OllamaErrorBody)
