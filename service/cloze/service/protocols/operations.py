"""The routes for operators: the page, probes, the served models and metrics."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cloze.model_store import Manifest
from cloze.model_store.embedding_space import own_recipe, tokens_recipe
from cloze.model_store.heads import sequence_classification, token_classification
from cloze.model_store.heads.sequence_classification import SequenceLabels
from cloze.model_store.heads.token_classification import TokenLabels, tag_scheme
from cloze.model_store.installation import DISTRIBUTION
from cloze.model_store.manifest import Role
from cloze.service import core, errors
from cloze.service.http.pages import PAGE, PAGE_HEADERS
from cloze.service.http.routes import HTML, RECORD, TEXT, Handler, Route, RouteDoc
from cloze.service.models.adapters import AdapterBundle
from cloze.service.models.pipeline import Models, Pipeline
from cloze.service.protocols.protocol import (
    ProtocolContext,
    ServerState,
    answer_probe,
    get_route,
    json_response,
)
from cloze.service.tasks import (
    embed,
    fill_mask,
    late_interaction,
    rerank,
    similarity,
    text_classification,
)
from cloze.service.tasks.task import ScoreKind
from cloze.service.threads import run_on_thread

PROBES: Final = frozenset(
    {
        *("/healthz", "/readyz", "/health", "/v2/health/live", "/v2/health/ready"),
        *("/ping", "/.well-known/live", "/.well-known/ready"),
    }
)

QUIET_ROUTES: Final = PROBES | {"/metrics"}
"""Routes that are asked every few seconds, so that their results need no log line."""


@dataclass(frozen=True, slots=True)
class Status:
    """The response to a probe."""

    status: str


_ALIVE: Final = Status("alive")
_READY: Final = Status("ready")


def probe_bodies(state: ServerState) -> dict[bytes, Callable[[], bytes | None]]:
    """Return, for the path of each probe, a function that returns the answer with status 200.

    The function returns None if the answer has another status.
    """
    return {
        b"/healthz": lambda: orjson.dumps(_ALIVE) if state.why_restart() is None else None,
        b"/readyz": lambda: orjson.dumps(_READY) if state.why_unready() is None else None,
    }


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the routes for operators."""
    state = context.state
    get = partial(get_route, tag="service")
    alive = partial(answer_probe, state.why_restart, _ALIVE)
    ready = partial(answer_probe, state.why_unready, _READY)
    health = partial(answer_probe, state.why_unready, None)
    metrics = partial(_metrics, context, ThreadPoolExecutor(1, "scrape"))
    page, text = {"media_types": (HTML,), "headers": PAGE_HEADERS}, {"media_types": (TEXT,)}
    root = partial(_page_or_status, alive)
    people = "A page on which people try the tasks; liveness for clients that ask for no HTML"
    changes = "Serve what the store, the keys and the certificate hold now"
    reload = RouteDoc(changes, "service", core.Changes, errors=(401, 403, 409, 503))
    return [
        get("/", root, people, Status, 503, **page),
        get("/healthz", alive, "Liveness: 503 once an engine is dead", Status, 503),
        get("/readyz", ready, "Readiness: 503 while draining or dead", Status, 503),
        get("/health", health, "Readiness, under the path of text-embeddings-inference", None, 503),
        get("/info", partial(_info, context), "The served models and their limits", dict[str, Any]),
        get("/metrics", metrics, "Metrics in Prometheus's text format", None, **text),
        Route("POST", "/admin/reload", partial(_reload, context), reload),
    ]


async def _page_or_status(alive: Handler, request: Request) -> Response:
    """Answer browsers, which name HTML; KServe's clients ask here whether the server lives."""
    if HTML in request.headers.get("accept", ""):
        return await PAGE(request)
    response = await alive(request)
    response.headers["vary"] = "accept"
    return response


async def _info(context: ProtocolContext, request: Request) -> Response:
    """Answer on a thread: a thousand adapters take a tenth of a second."""
    models = context.models_of(request.scope[RECORD])
    return json_response(await run_on_thread(_describe, context, models))


async def _metrics(context: ProtocolContext, scrapes: Executor, request: Request) -> Response:
    """Answer on a thread of its own: requests may occupy all threads of the loop."""
    exposition, accept = context.metrics.exposition, request.headers.get("accept", "")
    loop = asyncio.get_running_loop()
    text, content_type = await loop.run_in_executor(scrapes, exposition, accept)
    return Response(text, headers={"content-type": content_type})


async def _reload(context: ProtocolContext, _: Request) -> Response:
    """Answer what a reload changed.

    Without keys, no request may reload: a connection from loopback may be one of a proxy, and
    so of anybody.
    """
    if context.state.has_engines and not context.has_keys:
        raise errors.Forbidden(
            "without API keys, a server is reloaded by SIGHUP only; set CLOZE_KEYS_FILE to "
            "reload it by a key with the scope admin"
        )
    return json_response(await context.state.reload())


def _roles(pipeline: Pipeline) -> dict[str, Any] | None:
    """Return what the roles of texts change; None for a model without vectors for a search."""
    manifest, prompt_of = pipeline.manifest, pipeline.context.prompt_of
    own, options = manifest.embedding, late_interaction.interaction(manifest)
    if own is not None:
        differ = own.roles_differ
        rows = {role: (own.prompt_of(role), own_recipe(manifest, prompt_of(role))) for role in Role}
    elif options is not None:
        differ = options.roles_differ
        rows = {role: (role.value, tokens_recipe(manifest, "", role)) for role in Role}
    else:
        return None
    described = {
        role.value: {"prompt_name": name, "embedding_space": pipeline.embedding_space(recipe)}
        for role, (name, recipe) in rows.items()
    }
    return {"change_vectors": differ, **described}


def _describe(context: ProtocolContext, models: Models) -> dict[str, Any]:
    """Return the fields of text-embeddings-inference for the default model, and the models."""
    embeds = context.tasks.get(embed.TASK.name)
    shown = (models.default(embeds) if embeds else None) or models.pipelines[0]
    first = shown.manifest
    defaults = {name: models.default(task) for name, task in context.tasks.items()}
    embedding = first.embedding
    return {
        "model_id": first.name,
        "model_sha": first.source.revision,
        "model_dtype": shown.model.precision(),
        "model_type": _model_type(first),
        "max_input_length": embedding.max_tokens if embedding else first.limits.max_tokens,
        "max_client_batch_size": context.max_request_texts,
        "max_request_bytes": context.body_limits.max_bytes,
        "version": version(DISTRIBUTION),
        "defaults": {name: d.manifest.reference for name, d in defaults.items() if d},
        "models": [_model(context, models, pipeline) for pipeline in models.pipelines],
    }


def _model_type(manifest: Manifest) -> dict[str, Any]:
    """Return what text-embeddings-inference calls the type of a model; empty if it has none."""
    if manifest.embedding is not None:
        return {"embedding": {"pooling": "+".join(manifest.embedding.poolings)}}
    if sequence_classification.HEAD.name not in manifest.heads:
        return {}
    kind = "reranker" if rerank.scorer_of(manifest) == "classifier" else "classifier"
    numbered = [*enumerate(text_classification.sequence_labels(manifest).labels)]
    ids = {str(number): label for number, label in numbered}
    return {kind: {"id2label": ids, "label2id": {label: number for number, label in numbered}}}


def _model(context: ProtocolContext, models: Models, pipeline: Pipeline) -> dict[str, Any]:
    manifest, bundle, spaces = pipeline.manifest, pipeline.model.bundle, pipeline.own_spaces()
    described = {
        "name": manifest.name,
        "version": manifest.version,
        "aliases": [n for n in models.names_of[pipeline][1:] if n != manifest.name],
        "tasks": context.models.tasks_of[pipeline],
        "scores": _scores(context, pipeline),
        "family": manifest.architecture.family,
        "parameters": manifest.architecture.parameters,
        "precision": pipeline.model.precision(),
        "max_tokens": manifest.limits.max_tokens,
        "embedding": manifest.embedding.model_dump() if manifest.embedding else None,
        "embedding_space": spaces.get(embed.TASK.name),
        "embedding_spaces": spaces,
        "roles": _roles(pipeline),
        "license": manifest.license,
        "source": manifest.source.model_dump(),
    }
    if fill_mask.TASK.name in context.models.tasks_of[pipeline]:
        described["mask_token"] = manifest.tokenizer.mask_token
    options = manifest.heads.get(token_classification.HEAD.name)
    if isinstance(options, TokenLabels) and (scheme := tag_scheme(options.labels)):
        described["tag_scheme"] = scheme  # it marks the ends of entities
    labels = manifest.heads.get(sequence_classification.HEAD.name)
    if isinstance(labels, SequenceLabels) and labels.further:
        described["label_sets"] = labels.names
    if isinstance(bundle, AdapterBundle):
        described["base"] = bundle.base.manifest.reference
    return described


def _scores(context: ProtocolContext, pipeline: Pipeline) -> dict[str, ScoreKind]:
    """Return what the scores of each task are unless a request says otherwise."""
    tasks = [context.tasks[name] for name in context.models.tasks_of[pipeline]]
    if similarity.TASK in tasks or rerank.scorer_of(pipeline.manifest) == "classifier":
        tasks.append(rerank.TASK)
    kinds = {task.name: task.scores(pipeline.manifest, task.parameters()) for task in tasks}
    return {name: kind for name, kind in kinds.items() if kind is not None}
