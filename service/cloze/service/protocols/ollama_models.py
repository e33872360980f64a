"""The models in Ollama's protocol: what is served, what is in memory, and what is known of one.

The list has NAME of the newest version of each model, and its aliases. The other versions answer to
NAME@VERSION.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import version
from typing import Any, Final

from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response

from cloze.model_store.installation import DISTRIBUTION
from cloze.service.http.body import SHORT_BYTES, load, validate
from cloze.service.http.routes import RECORD, Route, RouteDoc
from cloze.service.models.pipeline import Pipeline
from cloze.service.protocols.ollama import MODEL
from cloze.service.protocols.protocol import (
    LenientModel,
    ProtocolContext,
    WireProtocol,
    gate_models,
    get_route,
    json_response,
)
from cloze.service.tasks import embed

_NEVER: Final = "9999-12-31T23:59:59+00:00"


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


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the routes that tell Ollama's clients what is served."""
    get = partial(get_route, tag="Ollama")
    about = {"version": version(DISTRIBUTION)}

    async def answer_version(_: Request) -> Response:
        return json_response(about)

    show_doc = RouteDoc(
        "What is known of a served model, in Ollama's shape",
        "Ollama",
        OllamaShowResponse,
        body=OllamaShowBody,
        examples={"A model": {"model": "cloze-bert"}},
    )
    tags, running = partial(_tags, context), partial(_running, context)
    every_model = gate_models(context.models.pipelines)
    return [
        get("/api/tags", tags, "The names of served models, in Ollama's shape", OllamaModelList),
        get("/api/ps", running, "The models in memory, in Ollama's shape", RunningModelList),
        Route("POST", "/api/show", partial(_show, context), show_doc, every_model),
        get("/api/version", answer_version, "The version of the server", dict[str, str]),
    ]


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
    row = {field.name: getattr(tag, field.name) for field in fields(tag)}
    longest = pipeline.manifest.limits.max_tokens
    return RunningModel(**row, expires_at=_NEVER, size_vram=0, context_length=longest)


def _details(pipeline: Pipeline) -> ModelDetails:
    architecture = pipeline.manifest.architecture
    family, size = architecture.family, f"{architecture.parameters / 1e6:.2f}M"
    precision = pipeline.model.precision().upper()
    return ModelDetails("", "onnx", family, [family], size, precision)


PROTOCOL: Final = WireProtocol(routes)
