"""The definition of a protocol, and what protocols share: the route of a task."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache, partial
from io import BytesIO
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from cloze.service import errors
from cloze.service.core import Changes, ServedRequest
from cloze.service.http.body import (
    SHORT_BYTES,
    BodyLimits,
    BytesResponse,
    RequestLimits,
    load,
    validate,
)
from cloze.service.http.bytes_held import SMALL_BYTES
from cloze.service.http.errors import ErrorInfo
from cloze.service.http.routes import GateModel, Handler, Route, RouteDoc
from cloze.service.models.pipeline import Models, Pipeline
from cloze.service.observe.metrics import Metrics
from cloze.service.tasks import Task
from cloze.service.tasks.wire import WireModel
from cloze.service.threads import check_awaited, run_anywhere

_PART_NUMBERS = 65_536
"""Most numbers of an array that are written in one call; a call takes about 2 ms."""


_json: Final = partial(orjson.dumps, option=orjson.OPT_SERIALIZE_NUMPY)


class ServerState(Protocol):
    """The state of the server that probes report."""

    has_engines: bool
    """Whether the engines are in this process, which so can reload."""

    def why_restart(self) -> errors.ServiceError | None:
        """Return why the process should be restarted; None if it should not."""

    def why_unready(self) -> errors.ServiceError | None:
        """Return why the process admits no request; None if it admits requests."""

    async def reload(self) -> Changes:
        """Serve what the store, the keys and the certificate hold now.

        Raises:
            ReloadRefused: that cannot be served; what was served before is served on.
        """


@dataclass(frozen=True, slots=True)
class ProtocolContext:
    """The parts of the service that routes use.

    `predict_route` and `health_route` are settings.
    """

    tasks: Mapping[str, Task]
    models: Models
    metrics: Metrics
    state: ServerState
    body_limits: BodyLimits
    max_request_texts: int
    limits: RequestLimits
    has_keys: bool
    predict_route: str = ""
    health_route: str = ""

    def models_of(self, request: ServedRequest) -> Models:
        """Return the models that exist for a request: those that its API key names, or all.

        Raises:
            Forbidden: none of the models that the key names is served.
        """
        if request.key is None or (names := request.key.entry.models) is None:
            return self.models
        models = self.models.within(frozenset(names))
        if not models.pipelines:
            raise errors.Forbidden(
                f"the key {request.key.name} is limited to models that are not served: "
                f"{', '.join(names)[:200]}"
            )
        return models


@dataclass(frozen=True, slots=True)
class WireProtocol:
    """A wire protocol: its routes and the shape of its errors.

    Attributes:
        routes: context -> the routes.
        prefixes: prefixes of the paths whose errors have the protocol's shape, also if a path is
            unknown; the longest prefix of a path counts.
        error: the type of the JSON of an error, made of its message unless `error_body` makes it.
        has_422: whether the protocol has the status 422; else status 400 stands for both.
        suffix: suffix of the same paths, which counts before the length of the prefix.
    """

    routes: Callable[[ProtocolContext], Sequence[Route]]
    prefixes: tuple[str, ...] = ()
    error: Callable[..., Any] | None = None
    error_body: Callable[[ErrorInfo], Any] | None = None
    has_422: bool = False
    suffix: str = ""


def json_response(value: Any, *, in_parts: bool = False) -> BytesResponse:
    """Return a value as JSON; it may have dataclasses and arrays.

    The interpreter runs no other thread while orjson writes a value, 0.8 s for 32,768 vectors, nor
    while parts are joined, so that a large value is written to a buffer in parts.
    """
    if not in_parts:
        return BytesResponse(_json(value))
    content = BytesIO()
    content.writelines(json_parts(value))
    return BytesResponse(content.getvalue())


def json_parts(value: Any) -> Iterator[bytes | memoryview]:
    """Yield the JSON of a value: arrays in parts, and each field and element by itself."""
    check_awaited()
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict) and value:
        for number, (name, item) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if number else b"{", orjson.dumps(name))
            yield from json_parts(item)
        yield b"}"
    elif isinstance(value, np.ndarray) and value.size > _PART_NUMBERS:
        rows = max(1, _PART_NUMBERS // value[0].size)
        for first in range(0, len(value), rows):
            yield b"," if first else b"["
            yield memoryview(_json(value[first : first + rows]))[1:-1]
        yield b"]"
    elif isinstance(value, list) and value:
        is_divided = isinstance(value[0], dict | np.ndarray) or is_dataclass(value[0])  # as all
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from json_parts(item) if is_divided else (_json(item),)
        yield b"]"
    else:
        yield _json(value)


def get_route(
    path: str, handler: Handler, summary: str, result: Any, *errors: int, **doc: Any
) -> Route:
    """Return a route for GET requests; see `RouteDoc` for what documents it."""
    return Route("GET", path, handler, RouteDoc(summary, result=result, errors=errors, **doc))


async def answer_probe(
    problem: Callable[[], errors.ServiceError | None], value: Any, _: Request, status: int = 200
) -> Response:
    """Return a value as JSON, or the status alone for None, unless the server has the problem."""
    if (error := problem()) is not None:
        raise error
    return Response(status_code=status) if value is None else json_response(value)


TIMING_HEADERS: Final[Mapping[str, tuple[str, str]]] = {
    "x-compute-time": ("integer", "milliseconds from tokenization to the last result"),
    "x-total-time": ("integer", "x-compute-time, as text-embeddings-inference names it"),
    "x-tokenization-time": ("integer", "milliseconds of tokenization"),
    "x-queue-time": ("integer", "milliseconds in the queue"),
    "x-inference-time": ("integer", "milliseconds in the engine"),
    "x-compute-tokens": ("integer", "tokens of its sequences, equal ones included"),
    "x-truncated": ("integer", "texts that were cut to the model's limit"),
    "x-score-kind": (
        "string",
        "what the scores are: probability, log-probability, raw score, cosine or maxsim; absent "
        "without scores",
    ),
    "x-warning": ("string", "warnings about the request; absent without warnings"),
    "x-embedding-space": ("string", "name of the space of the answer's vectors, if it has any"),
}


class TaskRoute:
    """A route of a task: how a body becomes a call of the task, and a value a response.

    Attributes:
        task: the task that the route serves.
        body: the model of the request's body, with a field ``model``.
        doc: the documentation of the route, without what all routes of tasks have.
        names: the body's own names of locations in a body of the native protocol. For example,
            `/rerank` has ``query`` instead of ``inputs.source_sentence``.
        serving: models -> those that may answer, the default first.
    """

    task: Task
    body: type[BaseModel]
    doc: RouteDoc
    names: ClassVar[Mapping[errors.Location, str]] = {}

    def __init__(self, context: ProtocolContext) -> None:
        self.context = context
        # Each limited API key has a set of models, whose order is remembered.
        self.serving = lru_cache(1024)(self._serving)

    def to_call(self, _: ServedRequest, body: Any) -> tuple[Any, Any]:
        """Return the inputs and the parameters of the task that a body asks for."""
        return body.inputs, body

    def respond(self, _: ServedRequest, __: Any, value: Any) -> Any:
        """Return the response to a request with a body, or its JSON; the value is the task's."""
        return value

    def _serving(self, models: Models) -> Sequence[Pipeline]:
        return models.serving(self.task)

    def in_body(self, at: errors.Location, _: Any) -> errors.Location:
        """Return the location in a body of what the native protocol has at a location."""
        for location, name in self.names.items():
            if at[: len(location)] == location:
                return errors.Location((name, *at[len(location) :]))
        return at

    def parse(self, _: ServedRequest, data: bytes) -> tuple["TaskRoute", Any]:
        """Return the route that a body is for, this one, and the parsed body."""
        return self, validate(self.body, load(data, self.context.body_limits))

    def bind(self, path: str) -> Route:
        """Return the route at a path."""
        doc = replace(
            self.doc,
            body=self.body,
            headers={**TIMING_HEADERS, **self.doc.headers},
        )
        handler = partial(answer_task, self.context, self.parse)
        return Route("POST", path, handler, doc, gate_models(self.serving(self.context.models)))


def gate_models(pipelines: Sequence[Pipeline]) -> list[GateModel]:
    """Return what the gate needs of models."""
    return [GateModel(p.reference, p.model.queue, p.model.bundle.path) for p in pipelines]


async def answer_task(
    context: ProtocolContext,
    parse: Callable[[ServedRequest, bytes], tuple[TaskRoute, Any]],
    http_request: Request,
    pipeline: Pipeline | None = None,
) -> Response:
    """Read the body of a request, choose the model, run the task, and return the response.

    Args:
        parse: (request, data) -> the route that a body is for, and the parsed body.
        pipeline: the model to use; None selects the one that the body names, or the default.

    Raises:
        ServiceError: the request gets no result.
    """
    with context.limits.request(http_request) as request:
        data = await context.limits.read(http_request, context.body_limits.max_bytes)
        is_short = len(data) <= SHORT_BYTES
        route, body = await run_anywhere(is_short, parse, request, data)
        del data  # a large body would otherwise stay in memory until the answer
        if pipeline is None:
            models = context.models if request.key is None else context.models_of(request)
            pipeline = models.choose(route.task, body.model, route.serving(models))
        request.model = pipeline.reference
        if (space := request.first.get(b"x-expect-embedding-space")) is not None:
            request.expected_space = space.decode("latin-1")
        inputs, parameters = await run_anywhere(is_short, route.to_call, request, body)
        try:
            begin_answer = partial(context.limits.begin_answer, request)
            value = await pipeline.run(route.task, inputs, parameters, request, begin_answer)
        except errors.RequestError as error:
            raise error.moved(error.at and route.in_body(error.at, body)) from None
        if body.model_extra or parameters.model_extra:
            request.warnings = (ignored_fields(body, parameters), *request.warnings)
        response = await run_anywhere(not request.is_large, _respond, route, request, body, value)
        if (kind := route.task.scores(pipeline.manifest, parameters)) is not None:
            response.raw_headers.append((b"x-score-kind", kind.encode()))
        if len(response.body) > SMALL_BYTES:
            await context.limits.hold_answer(request, len(response.body))
        return response


def _respond(route: TaskRoute, request: ServedRequest, body: Any, value: Any) -> BytesResponse:
    """Return the response to a request, with the headers that all answers of tasks have."""
    response = route.respond(request, body, value)
    if not isinstance(response, BytesResponse):
        response = json_response(response, in_parts=request.is_large)
    total_ms = 1000 * (request.tokenize_s + request.queue_s + request.inference_s)
    # The clients of text-embeddings-inference expect whole numbers.
    response.raw_headers += [
        (b"x-compute-time", b"%.0f" % total_ms),
        (b"x-total-time", b"%.0f" % total_ms),
        (b"x-tokenization-time", b"%.0f" % (1000 * request.tokenize_s)),
        (b"x-queue-time", b"%.0f" % (1000 * request.queue_s)),
        (b"x-inference-time", b"%.0f" % (1000 * request.inference_s)),
        (b"x-compute-tokens", b"%d" % request.tokens),
        (b"x-truncated", b"%d" % request.truncated),
    ]
    if request.embedding_space is not None:
        response.raw_headers.append((b"x-embedding-space", request.embedding_space.encode()))
    if request.warnings:
        warning = "; ".join(request.warnings)[:2000].encode("ascii")
        response.raw_headers.append((b"x-warning", warning))
    return response


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """An error in the shape of text-embeddings-inference, and the code of the error."""

    error: str
    error_type: str
    code: str


def error_body(error: ErrorInfo) -> ErrorBody:
    """Return the body of an error."""
    return ErrorBody(error.message, error.kind, error.code)


class LenientModel(WireModel):
    """A part of a body that may have unknown fields, as text-embeddings-inference allows."""

    model_config = ConfigDict(extra="allow")


_LONGEST_NAME, _MOST_NAMES = 40, 8


def ignored_fields(body: BaseModel, parameters: BaseModel) -> str:
    """Return a warning with the names of the unknown fields of a body and of its parameters."""
    names = list(body.model_extra or ())
    if parameters is not body:
        names += [f"parameters.{name}" for name in parameters.model_extra or ()]
    shown = ", ".join(ascii(name[:_LONGEST_NAME])[1:-1] for name in names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"ignored unknown fields: {shown}{more}"
