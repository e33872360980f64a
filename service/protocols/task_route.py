"""The route of a task: reads the body, chooses the model, runs the task, writes the response."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.abandonment import run_on_thread
from cloze.service.core import Location, RequestError
from cloze.service.http.bodies import receive, run_anywhere
from cloze.service.http.gate import GateModel
from cloze.service.http.memory_limit import SMALL_BYTES
from cloze.service.http.routes import BytesResponse, Route, RouteDoc
from cloze.service.http.watch import WatchedRequest
from cloze.service.logs import RequestCost
from cloze.service.pipeline import Models, Pipeline, TaskResult
from cloze.service.protocols.protocol import ProtocolContext
from cloze.service.tasks import Task, TaskCall

TIMING_HEADERS: Mapping[str, tuple[str, str]] = {
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
    "x-warning": ("string", "warnings about the request; absent without warnings"),
}


class TaskBody(Protocol):
    """The field that every request body of a task route has."""

    @property
    def model(self) -> str | None:
        """The served model that the request names; None selects the task's default."""
        ...


@dataclass(frozen=True, slots=True)
class TaskRoute:
    """The mapping of one route from a body to a task call, and from a task result to a response.

    Attributes:
        path: path of the route.
        task: the task that the route serves.
        body: the model of the request's body, with a field ``model``.
        to_call: body -> the task call.
        respond: (request, body, result) -> the response, without timing headers.
        doc: the documentation of the route.
        warnings: body -> warnings about the body for the client, in ASCII; None: there are none.
        check: checks the headers of a request before its texts are tokenized; None: nothing to
            check.
        names: the fields of the body, by the places of the task's inputs in the native protocol.
        serving: models -> those that may answer, the default first; None: those that serve the
            task.
    """

    path: str
    task: Task
    body: type[BaseModel]
    to_call: Callable[[Any], TaskCall]
    respond: Callable[[Request, Any, TaskResult], BytesResponse]
    doc: RouteDoc
    warnings: Callable[[Any], Sequence[str]] | None = None
    check: Callable[[Request], object] | None = None
    names: Mapping[tuple[str | int, ...], str] = field(default_factory=dict)
    serving: Callable[[Models], Sequence[Pipeline]] | None = None

    def bind(self, context: ProtocolContext) -> Route:
        """Return the route with a handler that uses the context's models."""
        endpoint = Endpoint(self, context)
        return Route("POST", self.path, endpoint.answer, self.doc, gate_models(endpoint.serving))


def gate_models(pipelines: Sequence[Pipeline]) -> list[GateModel]:
    """Return what the gate needs of models."""
    return [GateModel(p.manifest.reference, p.model.queue) for p in pipelines]


class Endpoint:
    """The handler of a task route.

    Args:
        route: the route.
        context: the parts of the service that the handler uses.

    Attributes:
        serving: the models that may answer, the default first.
    """

    def __init__(self, route: TaskRoute, context: ProtocolContext) -> None:
        self._route = route
        self._context = context
        models = context.models
        self.serving = route.serving(models) if route.serving else models.serving(route.task)

    async def answer(self, request: Request) -> Response:
        """Return the response to one request.

        Raises:
            ServiceError: the request gets no result.
        """
        with self._context.watch.request(request) as watched:
            limits = self._context.limits.body
            body, size = await receive(request, self._route.body, limits, watched)
            return await self.answer_body(request, body, size, watched)

    async def answer_body(
        self,
        request: Request,
        body: BaseModel,
        size: int,
        watched: WatchedRequest,
        pipeline: Pipeline | None = None,
    ) -> Response:
        """Return the response to a request whose body has arrived.

        Args:
            request: the request.
            body: the parsed body.
            size: bytes of the body.
            watched: the request's terms and the memory of its answer.
            pipeline: the model to use; None selects the one that the body names, or the default.

        Raises:
            ServiceError: the request gets no result.
        """
        route = self._route
        if pipeline is None:
            name = cast(TaskBody, body).model
            pipeline = self._context.models.choose(route.task, name, self.serving)
        reference = pipeline.manifest.reference
        watched.record.model = reference
        if route.check is not None:
            route.check(request)
        call = await run_anywhere(size, route.to_call, body)
        try:
            result = await pipeline.run(
                route.task,
                call,
                size=size,
                terms=watched.terms,
                before_large=watched.begin_answer,
            )
        except RequestError as error:
            raise error.moved(_in_body(error.at, route.names)) from None
        watched.record.cost = RequestCost(
            result.texts, result.tokens, result.timings, result.truncated
        )
        if result.is_large:
            response = await run_on_thread(route.respond, request, body, result)
        else:
            response = route.respond(request, body, result)
        _add_headers(response, result, route.warnings(body) if route.warnings else ())
        if len(response.body) > SMALL_BYTES:
            await watched.hold_answer(len(response.body))
        return response


def _in_body(at: Location | None, names: Mapping[tuple[str | int, ...], str]) -> Location | None:
    """Return the place in the body of what the native protocol has at another place.

    Args:
        at: the place in the native protocol.
        names: see `TaskRoute`.
    """
    for length in range(len(at or ()), 0, -1):
        if at is not None and (name := names.get(at[:length])) is not None:
            return Location((name, *at[length:]))
    return at


def _add_headers(response: BytesResponse, result: TaskResult, warnings: Sequence[str]) -> None:
    timings = result.timings
    total = _milliseconds(timings.tokenize_s + timings.queue_s + timings.inference_s)
    response.raw_headers += [
        (b"x-compute-time", total),
        (b"x-total-time", total),
        (b"x-tokenization-time", _milliseconds(timings.tokenize_s)),
        (b"x-queue-time", _milliseconds(timings.queue_s)),
        (b"x-inference-time", _milliseconds(timings.inference_s)),
        (b"x-compute-tokens", b"%d" % result.tokens),
        (b"x-truncated", b"%d" % result.truncated),
    ]
    if result.warnings or warnings:
        warning = "; ".join((*warnings, *result.warnings))[:2000].encode("ascii")
        response.raw_headers.append((b"x-warning", warning))


def _milliseconds(seconds: float) -> bytes:
    # The clients of text-embeddings-inference expect whole numbers.
    return b"%d" % round(seconds * 1000)
