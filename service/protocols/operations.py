"""The routes for operators: the page, probes, the served models and metrics."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cloze.model_store.installation import DISTRIBUTION
from cloze.service import core
from cloze.service.http.pages import PAGE_HEADERS, page_handler
from cloze.service.http.record import OF_ADMIN_SOCKET
from cloze.service.http.routes import HTML, TEXT, BytesResponse, Route, RouteDoc
from cloze.service.protocols.protocol import ProtocolContext, ServerState, check, json_response
from cloze.service.tasks import embed

_TAG = "service"
"""The group of these routes in the documentation."""

PROBES: Final = frozenset({"/healthz", "/readyz", "/health", "/v2/health/live", "/v2/health/ready"})

QUIET_ROUTES: Final = PROBES | {"/metrics"}
"""Routes that are asked every few seconds, so that their results need no log line."""


@dataclass(frozen=True, slots=True)
class Status:
    """The response to a probe."""

    status: str


_ALIVE: Final = orjson.dumps(Status("alive"))
_READY: Final = orjson.dumps(Status("ready"))


def probe_bodies(state: ServerState) -> dict[bytes, Callable[[], bytes | None]]:
    """Return, for the path of each probe, a function that returns the answer with status 200.

    The function returns None if the answer has another status.
    """
    return {
        b"/healthz": lambda: _ALIVE if state.broken() is None else None,
        b"/readyz": lambda: _READY if state.unready() is None else None,
    }


def routes(context: ProtocolContext, error_body: Any) -> Sequence[Route]:
    """Return the routes for operators.

    Args:
        context: the parts of the service that the routes report on.
        error_body: the type of an error's JSON.
    """
    operations = _Operations(context)

    probe = partial(RouteDoc, tag=_TAG, error_body=error_body, errors=(503,))
    report = partial(RouteDoc, tag=_TAG, error_body=error_body)
    healthz = probe("Liveness: 503 once an engine is dead", result=Status)
    readyz = probe("Readiness: 503 while draining or dead", result=Status)
    health = probe("Readiness, under the path of text-embeddings-inference", result=None)
    info = report("The served models and their limits", result=dict[str, Any])
    metrics = report("Metrics in Prometheus's text format", result=None, media_types=(TEXT,))
    page = report("A page on which people try the tasks", result=None, media_types=(HTML,))
    page = replace(page, headers=PAGE_HEADERS)
    reload = RouteDoc(
        "Serve what the store, the keys and the certificate hold now",
        tag=_TAG,
        result=core.Changes,
        error_body=error_body,
        errors=(401, 403, 409, 503),
    )
    return [
        Route("GET", "/", page_handler(), page),
        Route("GET", "/healthz", operations.alive, healthz),
        Route("GET", "/readyz", operations.ready, readyz),
        Route("GET", "/health", operations.health, health),
        Route("GET", "/info", operations.info, info),
        Route("GET", "/metrics", operations.metrics, metrics),
        Route("POST", "/admin/reload", operations.reload, reload),
    ]


class _Operations:
    """The handlers of the routes."""

    def __init__(self, context: ProtocolContext) -> None:
        self._context = context
        self._scrapes = ThreadPoolExecutor(1, "scrape")

    async def alive(self, _: Request) -> Response:
        check(self._context.state.broken())
        return BytesResponse(_ALIVE)

    async def ready(self, _: Request) -> Response:
        check(self._context.state.unready())
        return BytesResponse(_READY)

    async def health(self, _: Request) -> Response:
        check(self._context.state.unready())
        return Response()

    async def info(self, _: Request) -> Response:
        return json_response(_info(self._context))

    async def metrics(self, request: Request) -> Response:
        """Answer on a thread of its own: requests may occupy all threads of the loop."""
        exposition, accept = self._context.metrics.exposition, request.headers.get("accept", "")
        loop = asyncio.get_running_loop()
        text, content_type = await loop.run_in_executor(self._scrapes, exposition, accept)
        return Response(text, headers={"content-type": content_type})

    async def reload(self, request: Request) -> Response:
        """Answer what a reload changed.

        Without keys, only clients of the admin socket may reload: a connection from loopback may be
        one of a proxy, and so of anybody.
        """
        if not self._context.has_keys and not request.scope.get("state", {}).get(OF_ADMIN_SOCKET):
            raise core.Forbidden(
                "without API keys, a server is reloaded through its admin socket only; set "
                "CLOZE_ADMIN_SOCKET or CLOZE_KEYS_FILE, or send SIGHUP"
            )
        return json_response(await self._context.state.reload())


def _info(context: ProtocolContext) -> dict[str, Any]:
    """Return the fields of text-embeddings-inference for the default model, and all models."""
    models, limits = context.models, context.limits
    embeds = context.tasks.get(embed.TASK.name)
    shown = (models.default(embeds) if embeds else None) or models.pipelines[0]
    first = shown.manifest
    defaults = {name: models.default(task) for name, task in context.tasks.items()}
    embedding = first.embedding
    return {
        "model_id": first.name,
        "model_sha": first.source.revision,
        "model_dtype": shown.model.precision(),
        "model_type": {"embedding": {"pooling": embedding.pooling}} if embedding else {},
        "max_input_length": embedding.max_tokens if embedding else first.limits.max_tokens,
        "max_client_batch_size": limits.max_request_texts,
        "max_request_bytes": limits.body.max_bytes,
        "version": version(DISTRIBUTION),
        "defaults": {name: d.manifest.reference for name, d in defaults.items() if d},
        "models": [
            {
                "name": manifest.name,
                "version": manifest.version,
                "tasks": models.tasks_of(pipeline),
                "family": manifest.architecture.family,
                "parameters": manifest.architecture.parameters,
                "precision": pipeline.model.precision(),
                "max_tokens": manifest.limits.max_tokens,
                "embedding": manifest.embedding.model_dump() if manifest.embedding else None,
                "license": manifest.license,
                "source": manifest.source.model_dump(),
            }
            for pipeline in models.pipelines
            for manifest in (pipeline.manifest,)
        ],
    }
