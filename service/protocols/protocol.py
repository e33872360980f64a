"""The definition of a protocol, and what protocols share: the route of a task.

Each protocol module of the package defines its protocol as `PROTOCOL`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from io import BytesIO
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.core import Changes, Forbidden, Location, RequestError, ServiceError
from cloze.service.http.errors import ERROR_STATUSES, ErrorInfo, without_422
from cloze.service.http.json_bodies import BodyLimits, load, run_anywhere, validate
from cloze.service.http.memory_limit import SMALL_BYTES
from cloze.service.http.record import RequestRecord
from cloze.service.http.routes import BytesResponse, GateModel, Route, RouteDoc
from cloze.service.http.watch import RequestWatch
from cloze.service.models.pipeline import Models, Pipeline, TaskResult
from cloze.service.observe.logs import RequestCost
from cloze.service.observe.metrics import Metrics
from cloze.service.tasks import Task, TaskCall
from cloze.service.tasks.wire import WireModel
from cloze.service.threads import check_awaited, run_on_thread

_PART_NUMBERS = 65_536
"""Most numbers of an array that are written in one call; a call takes about 2 ms."""


class ServerState(Protocol):
    """The state of the server that probes report.

    Attributes:
        reopens: whether the process can open engines, and so reload.
    """

    reopens: bool

    def broken(self) -> ServiceError | None:
        """Return why the process should be restarted; None if it should not."""
        ...

    def unready(self) -> ServiceError | None:
        """Return why the process admits no request; None if it admits requests."""
        ...

    async def reload(self) -> Changes:
        """Serve what the store, the keys and the certificate hold now.

        Raises:
            ReloadRefused: that cannot be served; what was served before is served on.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProtocolContext:
    """The parts of the service that routes use."""

    tasks: Mapping[str, Task]
    models: Models
    metrics: Metrics
    state: ServerState
    body_limits: BodyLimits
    max_request_texts: int
    watch: RequestWatch
    has_keys: bool

    def models_of(self, record: RequestRecord) -> Models:
        """Return the models that exist for a request: those that its API key names, or all.

        Raises:
            Forbidden: none of the models that the key names is served.
        """
        if record.key is None or (names := record.key.entry.models) is None:
            return self.models
        models = self.models.within(frozenset(names))
        if not models.pipelines:
            raise Forbidden(
                f"the key {record.key.name} is limited to models that are not served: "
                f"{', '.join(names)[:200]}"
            )
        return models


@dataclass(frozen=True, slots=True)
class WireProtocol:
    """A wire protocol: its routes and the shape of its errors.

    Attributes:
        name: name of the protocol.
        prefixes: prefixes of the protocol's paths. The protocol with the longest prefix of a path
            writes the errors of the path, also if the path is unknown.
        routes: context -> the routes.
        error: error -> the HTTP status, and the value that becomes the JSON body.
    """

    name: str
    prefixes: tuple[str, ...]
    routes: Callable[[ProtocolContext], Sequence[Route]]
    error: Callable[[ErrorInfo], tuple[int, Any]]


def json_response(value: Any, *, in_parts: bool = False) -> BytesResponse:
    """Return a value as JSON; it may have dataclasses and arrays.

    The interpreter runs no other thread while orjson writes a value, 0.8 s for 32,768 vectors, so
    that a large value is written in parts.
    """
    if not in_parts:
        return BytesResponse(_json(value))
    content = BytesIO()
    for part in json_parts(value):
        content.write(part)
    return BytesResponse(content.getvalue())


def json_parts(value: Any) -> Iterator[bytes | memoryview]:
    """Yield the JSON of a value: arrays in parts, and each element of a list by itself."""
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
        is_divided = _has_array(value[0])  # as all of them
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from json_parts(item) if is_divided else (_json(item),)
        yield b"]"
    else:
        yield _json(value)


def _has_array(value: Any) -> bool:
    """Whether a value may be long: an array, an object, or a dataclass with an array."""
    if is_dataclass(value):
        return any(isinstance(getattr(value, each.name), np.ndarray) for each in fields(value))
    return isinstance(value, dict | np.ndarray)


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


async def answer_probe(
    problem: Callable[[], ServiceError | None], value: Any, _: Request
) -> Response:
    """Return a value as JSON, unless the server has the problem."""
    if (error := problem()) is not None:
        raise error
    return json_response(value)


# ---- the route of a task -------------------------------------------------------------------------


STATUSES_WITHOUT_422: Final = tuple(sorted(set(map(without_422, ERROR_STATUSES))))

TIMING_HEADERS: Final[Mapping[str, tuple[str, str]]] = {
    "x-compute-time": ("integer", "milliseconds from tokenization to the last result"),
    "x-total-time": (
        "integer",
        "the value of x-compute-time, under the name of text-embeddings-inference",
    ),
    "x-tokenization-time": ("integer", "milliseconds of tokenization"),
    "x-queue-time": ("integer", "milliseconds in the queue"),
    "x-inference-time": ("integer", "milliseconds in the engine"),
    "x-compute-tokens": ("integer", "tokens that the engine ran"),
    "x-truncated": ("integer", "texts that were cut to the model's limit"),
    "x-score-kind": (
        "string",
        "what the scores are: probability, log-probability, raw score, cosine or maxsim; absent "
        "without scores",
    ),
    "x-warning": ("string", "warnings about the request; absent without warnings"),
    "x-embedding-space": ("string", "name of the space of the answer's vectors, if it has any"),
}

_EXPECTED_SPACE: Final = b"x-expect-embedding-space"
"""The header of a request that refuses vectors of another space."""


Names = Mapping[tuple[str | int, ...], str]
"""The fields of a body, by the places of the task's inputs in the native protocol."""


class TaskRoute(ABC):
    """A route of a task: how a body becomes a task call, and a task result a response.

    Attributes:
        task: the task that the route serves.
        body: the model of the request's body, with a field ``model``.
        doc: the documentation of the route, without what all routes of tasks have.
        names: the names that the body's fields have instead of those of the native protocol.
        check: checks the headers of a request before its texts are tokenized; None: nothing to
            check.
        models: the models that may answer, the default first.
    """

    task: Task
    body: type[BaseModel]
    doc: RouteDoc
    names: ClassVar[Names] = {}
    check: Callable[[Request], object] | None = None

    def __init__(self, context: ProtocolContext) -> None:
        self.context = context
        self.models = self.serving(context.models)

    @abstractmethod
    def to_call(self, body: Any) -> TaskCall:
        """Return the call of the task that a body asks for."""

    def respond(self, _: Request, __: Any, result: TaskResult) -> BytesResponse:
        """Return the response to a request with a body, without timing headers."""
        return json_response(result.value)

    def serving(self, models: Models) -> Sequence[Pipeline]:
        """Return the models that may answer, the default first."""
        return models.serving(self.task)

    def place(self, at: Location | None, _: Any) -> Location | None:
        """Return the place in a body of the route of what the native protocol has at ``at``."""
        return in_body(at, self.names)

    def parse(self, _: Request, data: bytes) -> tuple["TaskRoute", Any]:
        """Return the route that a body is for, this one, and the parsed body."""
        return self, validate(self.body, load(data, self.context.body_limits))

    def bind(self, path: str) -> Route:
        """Return the route at a path."""
        doc = replace(
            self.doc,
            body=self.body,
            headers={**TIMING_HEADERS, **self.doc.headers},
            errors=self.doc.errors or ERROR_STATUSES,
        )
        handler = partial(answer_task, self.context, self.parse)
        return Route("POST", path, handler, doc, gate_models(self.models))


def gate_models(pipelines: Sequence[Pipeline]) -> list[GateModel]:
    """Return what the gate needs of models."""
    return [GateModel(p.reference, p.model.queue, p.model.bundle.path) for p in pipelines]


async def answer_task(
    context: ProtocolContext,
    parse: Callable[[Request, bytes], tuple[TaskRoute, Any]],
    request: Request,
    pipeline: Pipeline | None = None,
) -> Response:
    """Read the body of a request, choose the model, run the task, and return the response.

    Args:
        context: the parts of the service that the route uses.
        parse: (request, data) -> the route that a body is for, and the parsed body.
        request: the request.
        pipeline: the model to use; None selects the one that the body names, or the default.

    Raises:
        ServiceError: the request gets no result.
    """
    with context.watch.request(request) as watched:
        data = await watched.read_body(context.body_limits.max_bytes)
        size = len(data)
        route, body = await run_anywhere(size, parse, request, data)
        del data  # a large body would otherwise stay in memory until the answer
        if pipeline is None:
            models, serving = context.models, route.models
            if watched.record.key is not None:
                models = context.models_of(watched.record)
                serving = serving if models is context.models else route.serving(models)
            pipeline = models.choose(route.task, body.model, serving)
        watched.record.model = pipeline.reference
        if route.check is not None:
            route.check(request)
        call = await run_anywhere(size, route.to_call, body)
        record = watched.record
        space = record.first.get(_EXPECTED_SPACE)
        try:
            result = await pipeline.run(
                route.task,
                call,
                size=size,
                terms=watched.terms,
                before_large=watched.begin_answer,
                expected_space=space.decode("latin-1") if space is not None else None,
                charge=record.charge if record.key is not None else None,
            )
        except RequestError as error:
            raise error.moved(route.place(error.at, body)) from None
        watched.record.cost = RequestCost(
            result.texts, result.tokens, result.timings, result.truncated
        )
        if result.is_large:
            response = await run_on_thread(route.respond, request, body, result)
        else:
            response = route.respond(request, body, result)
        warnings = ignored_fields(body) if isinstance(body, LenientModel) else ()
        _add_headers(response, result, warnings)
        if (kind := route.task.scores(pipeline.manifest, call.parameters)) is not None:
            response.raw_headers.append((b"x-score-kind", kind.encode()))
        if len(response.body) > SMALL_BYTES:
            await watched.hold_answer(len(response.body))
        return response


def in_body(at: Location | None, names: Names) -> Location | None:
    """Return the place in the body of what the native protocol has at ``at``."""
    for length in range(len(at or ()), 0, -1):
        if at is not None and (name := names.get(at[:length])) is not None:
            return Location((name, *at[length:]))
    return at


def _add_headers(response: BytesResponse, result: TaskResult, warnings: Sequence[str]) -> None:
    timings = result.timings
    total_ms = 1000 * (timings.tokenize_s + timings.queue_s + timings.inference_s)
    # The clients of text-embeddings-inference expect whole numbers.
    response.raw_headers += [
        (b"x-compute-time", b"%.0f" % total_ms),
        (b"x-total-time", b"%.0f" % total_ms),
        (b"x-tokenization-time", b"%.0f" % (1000 * timings.tokenize_s)),
        (b"x-queue-time", b"%.0f" % (1000 * timings.queue_s)),
        (b"x-inference-time", b"%.0f" % (1000 * timings.inference_s)),
        (b"x-compute-tokens", b"%d" % result.tokens),
        (b"x-truncated", b"%d" % result.truncated),
    ]
    if result.embedding_space is not None:
        response.raw_headers.append((b"x-embedding-space", result.embedding_space.encode()))
    if result.warnings or warnings:
        warning = "; ".join((*warnings, *result.warnings))[:2000].encode("ascii")
        response.raw_headers.append((b"x-warning", warning))


# ---- what the native protocol shares with text-embeddings-inference ------------------------------


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """An error in the shape of text-embeddings-inference, which the native protocol shares."""

    error: str
    error_type: str


def write_error(error: ErrorInfo) -> tuple[int, ErrorBody]:
    """Return the status and the body of an error."""
    return error.status, ErrorBody(error.message, error.kind)


class LenientModel(WireModel):
    """A part of a request body that may have unknown fields, as text-embeddings-inference allows.

    Known fields are validated.
    """

    model_config = ConfigDict(extra="allow")


_LONGEST_NAME, _MOST_NAMES = 40, 8


def ignored_fields(body: Any) -> Sequence[str]:
    """Return a warning with the names of a body's unknown fields; none if all are known.

    Args:
        body: a `LenientModel`, whose ``parameters`` may be one too.
    """
    names = list(body.model_extra)
    if parameters := vars(body).get("parameters"):  # getattr of a missing field takes microseconds
        names += [f"parameters.{name}" for name in parameters.model_extra]
    if not names:
        return ()
    shown = ", ".join(ascii(name[:_LONGEST_NAME])[1:-1] for name in names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (f"ignored unknown fields: {shown}{more}",)
