"""The lists of models of OpenAI's protocol: ``/v1/models``, ``/models`` and ``/v1/models/NAME``.

A model has a row per name: NAME@VERSION, NAME for the newest version, and each alias. Some clients
refuse a name that has no row.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final, Literal
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from cloze.service.http.routes import RECORD, Route
from cloze.service.models.pipeline import Pipeline
from cloze.service.protocols.protocol import (
    ProtocolContext,
    WireProtocol,
    get_route,
    json_response,
)
from cloze.service.tasks import embed, rerank

_SHORT_PATH: Final = "/models"
"""Another path of ``/v1/models``, which the servers of vLLM and Infinity have."""


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


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the routes that list models."""

    async def models(request: Request) -> Response:
        models = context.models_of(request.scope[RECORD])
        rows = [_row(p, name) for p in models.pipelines for name in models.names_of[p]]
        return json_response(ModelList("list", rows))

    async def model(request: Request) -> Response:
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

    get = partial(get_route, tag="OpenAI")
    return [
        get("/v1/models", models, "The names of served models, in OpenAI's shape", ModelList),
        get(_SHORT_PATH, models, "The names of served models, in OpenAI's shape", ModelList),
        get(
            "/v1/models/{model}", model, "A served model, in OpenAI's shape", ModelStatus, 404, 503
        ),
    ]


def _row(pipeline: Pipeline, name: str) -> ModelRow:
    created = int(pipeline.manifest.created.timestamp())
    spaces = pipeline.own_spaces()
    own = spaces.get(embed.TASK.name)
    return ModelRow(name, "model", created, "cloze", own, spaces, "base", {})


PROTOCOL: Final = WireProtocol(routes)
