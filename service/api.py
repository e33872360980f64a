"""The HTTP application: task routes, probes, metrics, documentation, and the one table of errors. Knows no task."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi_offline import FastAPIOffline
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from model_store import Task
from service import core
from service.http import Connection, DirectRoutes
from service.metrics import CONTENT_TYPE, Metrics
from service.pipeline import Models
from service.task_api import BODIES, JSON, TASK_ROUTES, ApiLimits, TaskApi

STATUS: dict[type[Exception], tuple[int, str]] = {
    core.MalformedRequest: (400, "Validation"),
    core.EmptyRequest: (400, "Empty"),
    core.UnknownModel: (404, "Validation"),
    core.SlowRequest: (408, "Validation"),
    core.RequestTooLarge: (413, "Validation"),
    core.InvalidRequest: (422, "Validation"),
    core.WrongTask: (424, "Backend"),
    core.Overloaded: (429, "Overloaded"),
    core.ClientGone: (499, "Validation"),
    core.EngineFailed: (500, "Backend"),
    core.ShuttingDown: (503, "Unhealthy"),
    core.EngineDead: (503, "Unhealthy"),
    core.DeadlineExceeded: (504, "Overloaded"),
}
"""The HTTP status and the ``error_type`` of every error a request may get."""

_SERVICE_ROUTES = ("/healthz", "/readyz", "/health", "/info", "/metrics", "/v1/models", "/docs", "/openapi.json")


@dataclass(frozen=True, slots=True)
class Health:
    """What probes ask.

    Attributes:
        dead: why an engine is dead; None while all live.
        draining: whether the server admits nothing more.
        restarts: whether somebody else restarts a dead engine, so that this process is alive all the same.
    """

    dead: Callable[[], str | None]
    draining: Callable[[], bool]
    restarts: bool = False


def create_api(models: Models, metrics: Metrics, health: Health, limits: ApiLimits) -> FastAPI:
    """The application: task routes, probes, metrics and documentation.

    Args:
        models: who answers.
        metrics: what is observed.
        health: what the probes say.
        limits: see `ApiLimits`.
    """
    app = FastAPIOffline(
        title="Cloze",
        version=version("cloze"),
        description="Fill-mask, embeddings, next sentence and question answering by BERT and DistilBERT.",
        redoc_url=None,
        static_url="/docs/assets",
        swagger_ui_oauth2_redirect_url="/docs/oauth2-redirect",
        telemetry={"tracing": False, "metrics": False, "logs": False},  # it looks for each of them at every request
    )
    tasks = TaskApi(models, metrics, limits)
    app.include_router(tasks.router())
    app.include_router(_service_routes(models, metrics, health, limits))
    for kind in (core.ServiceError, HTTPException, Exception):
        app.add_exception_handler(kind, _respond_to_error)
    _document(app)
    app.add_middleware(DirectRoutes, handlers=tasks.handlers(), respond=_respond_to_error)
    app.add_middleware(Connection, known_routes=(*TASK_ROUTES, *_SERVICE_ROUTES), observe=metrics.observe_request)
    return app


# ---- service routes ------------------------------------------------------------------------------------------------


def _service_routes(models: Models, metrics: Metrics, health: Health, limits: ApiLimits) -> APIRouter:
    router = APIRouter(tags=["service"])

    def check_engine() -> None:
        if (reason := health.dead()) is not None:
            raise core.EngineDead(f"the engine is dead: {reason}")

    def check_ready() -> None:
        check_engine()
        if health.draining():
            raise core.ShuttingDown("the server is shutting down")

    @router.get("/healthz", summary="Liveness: 503 once an engine is dead")
    async def healthz() -> dict[str, str]:
        if not health.restarts:
            check_engine()
        return {"status": "alive"}

    @router.get("/readyz", summary="Readiness: 503 while draining or dead")
    async def readyz() -> dict[str, str]:
        check_ready()
        return {"status": "ready"}

    @router.get("/health", summary="Readiness, as text-embeddings-inference names it")
    async def tei_health() -> Response:
        check_ready()
        return Response()

    @router.get("/info", summary="What is served, and its limits")
    async def info() -> dict[str, Any]:
        return _info(models, limits)

    @router.get("/v1/models", summary="What is served, as OpenAI's API has it")
    async def openai_models() -> dict[str, Any]:
        rows = [
            {"id": m.reference, "object": "model", "created": int(m.created.timestamp()), "owned_by": "cloze"}
            for m in (pipeline.manifest for pipeline in models.pipelines)
        ]
        return {"object": "list", "data": rows}

    @router.get("/metrics", summary="For Prometheus")
    async def scrape() -> Response:
        # Adding up those of many processes takes long enough to be felt.
        text = await asyncio.to_thread(metrics.exposition) if metrics.shared else metrics.exposition()
        return Response(text, headers={"content-type": CONTENT_TYPE})

    return router


def _info(models: Models, limits: ApiLimits) -> dict[str, Any]:
    """text-embeddings-inference's fields, of the default model, and a list of all models with their tasks."""
    shown = models.default(Task.EMBED) or models.pipelines[0]
    first = shown.manifest
    return {
        "model_id": first.name,
        "model_sha": first.source.revision,
        "model_dtype": shown.precision,
        "model_type": {"embedding": {"pooling": first.embedding.pooling}} if first.embedding else {},
        "max_input_length": first.embedding.max_tokens if first.embedding else first.limits.max_tokens,
        "max_client_batch_size": limits.max_request_texts,
        "max_request_bytes": limits.max_request_bytes,
        "version": version("cloze"),
        "defaults": {task: default.manifest.reference for task in Task if (default := models.default(task))},
        "models": [
            {
                "name": manifest.name,
                "version": manifest.version,
                "tasks": manifest.tasks,
                "family": manifest.architecture.family,
                "parameters": manifest.architecture.parameters,
                "precision": pipeline.precision,
                "max_tokens": manifest.limits.max_tokens,
                "embedding": manifest.embedding.model_dump() if manifest.embedding else None,
                "license": manifest.license,
                "source": manifest.source.model_dump(),
            }
            for pipeline in models.pipelines
            for manifest in (pipeline.manifest,)
        ],
    }


# ---- errors and documentation --------------------------------------------------------------------------------------


async def _respond_to_error(request: Request, error: Exception) -> Response:
    """Every error, ours, the router's and bugs, as ``{"error", "error_type"}``; under ``/v1/`` in OpenAI's shape."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        status, kind = error.status_code, "Validation"
        message = {
            404: f"there is no route {ascii(request.url.path)[:120]}; see /docs",
            405: f"{request.url.path} does not answer {request.method}",
        }.get(status, str(error.detail))
        headers = dict(error.headers or {})
    elif isinstance(error, core.ServiceError):
        status, kind = STATUS[type(error)]
        message = str(error)
        if isinstance(error, core.Overloaded):
            headers["retry-after"] = str(error.retry_after_s)
        elif isinstance(error, core.SlowRequest):
            headers["connection"] = "close"  # what is left of the body would be taken for the next request
    else:
        status, kind, message = 500, "Backend", "an internal error; it was logged"
    body: dict[str, Any] = {"error": message, "error_type": kind}
    if request.scope["path"].startswith("/v1/"):
        status = 400 if status == 422 else status
        code = "model_not_found" if isinstance(error, core.UnknownModel) else None
        body = {"error": {"message": message, "type": _openai_type(status), "param": None, "code": code}}
    return Response(orjson.dumps(body), status, headers, JSON)


def _openai_type(status: int) -> str:
    return "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"


def _document(app: FastAPI) -> None:
    """Add the request bodies, which the routes parse themselves, to the OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            _, schemas = models_json_schema(
                [(body, "validation") for body in BODIES.values()], ref_template="#/components/schemas/{model}"
            )
            document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
            for path, body in BODIES.items():
                content = {JSON: {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
                document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
