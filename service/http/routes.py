"""Routes, and how their requests are answered and recorded."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloze.service.core import Queue, ServiceError
from cloze.service.http.memory_limit import UnreadAnswers
from cloze.service.http.record import RECORD, Access, RequestRecord
from cloze.service.observe.logs import AccessLog, AccessRecord
from cloze.service.observe.metrics import Metrics
from cloze.service.observe.tracing import Tracing

JSON = "application/json"
RAW = "application/octet-stream"
NPY = "application/x-npy"
TEXT = "text/plain"
HTML = "text/html"

OTHER_ROUTE = "other"
"""Metric label of requests to unknown routes, so that the number of labels is bounded."""

Handler = Callable[[Request], Awaitable[Response]]

Respond = Callable[[Request, Exception], Awaitable[Response]]
"""(request, error) -> the response to the error."""


class BytesResponse(Response):
    """A response with a body of bytes.

    Starlette encodes each header of each response. Here the headers are bytes already, with names
    in lower case.
    """

    def __init__(
        self, body: bytes, media_type: bytes = b"application/json", *headers: tuple[bytes, bytes]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = body
        self.raw_headers = [
            (b"content-length", b"%d" % len(body)),
            (b"content-type", media_type),
            *headers,
        ]


class GateModel(NamedTuple):
    """A served model of a route, by its full name.

    Models with the same `folder` wait in one queue: a base and its adapters.
    """

    reference: str
    queue: Queue
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """The documentation of a route in OpenAPI.

    Attributes:
        tag: the group of the route in the documentation.
        result: the type of the response's JSON; None if the response has no JSON.
        error_body: the type of an error's JSON.
        body: the model of the request's body; None if the request has no body.
        examples: request bodies by title.
        media_types: media types of the response besides JSON.
        headers: headers of the response: name -> (type, description).
        errors: error statuses that the route may return.
    """

    summary: str
    tag: str
    result: Any
    error_body: Any
    body: type[BaseModel] | None = None
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    media_types: tuple[str, ...] = ()
    headers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    errors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the HTTP interface with its handler.

    Attributes:
        models: the served models that may answer, the default first. Their gate refuses requests
            of the route while the server is full. None: the route is for operators.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    doc: RouteDoc
    models: Sequence[GateModel] | None = None


class DirectRoutes:
    """The ASGI application of all routes, which calls the handlers of POST routes without a router.

    `docs/decisions/0007` has the measured difference.

    Args:
        router: answers all other requests.
        handlers: the handlers of POST routes by path.
        respond: returns the response to a `ServiceError` of a handler.
    """

    def __init__(
        self, router: ASGIApp, handlers: Mapping[str, Handler], access: Access, respond: Respond
    ) -> None:
        self._router, self._handlers = router, handlers
        self._access, self._respond = access, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request = Request(scope, receive)
        handler = self._handlers.get(scope["path"]) if scope["method"] == "POST" else None
        try:
            self._access.check(scope[RECORD])
            if handler is None:
                await self._router(scope, receive, send)
                return
            response = await handler(request)
        except ServiceError as error:
            response = await self._respond(request, error)
        await response(scope, receive, send)


class Recorder:
    """Records the requests of one process: their metrics, their spans and their log lines.

    Args:
        tracing: makes the spans of requests; None: there are none.
        respond: returns the response to an error that nothing else has handled.
    """

    def __init__(
        self,
        metrics: Metrics,
        access_log: AccessLog,
        tracing: Tracing | None,
        answers: UnreadAnswers,
        respond: Respond,
    ) -> None:
        self._metrics, self._access_log, self._tracing = metrics, access_log, tracing
        self._answers, self._respond = answers, respond

    async def answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Let an application answer a request, add its id and its model, and record the answer."""
        record: RequestRecord = scope[RECORD]
        status = 0
        if self._tracing is not None:
            record.trace = self._tracing.begin(
                record.method, record.path, record.headers, record.arrived
            )

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.identity)]
                if record.model:
                    message["headers"].append((b"x-model", record.model.encode("ascii")))
            await send(message)

        self._metrics.in_flight += 1
        try:
            await app(scope, receive, send_with_id)
        except Exception as error:
            # Starlette's own handler is outside of this one, so its answer would have no id.
            response = await self._respond(Request(scope), error)
            if not status:
                await response(scope, receive, send_with_id)
            raise  # so that uvicorn logs the traceback
        finally:
            self._metrics.in_flight -= 1
            if record.hold is not None:
                self._answers.sent(record.connection, record.hold)
                record.hold = None
            self.add(record, status or 500)

    def add(self, record: RequestRecord, status: int) -> None:
        """Record a request that is answered with a status.

        A request without a result costs its key no tokens, as it adds none to the metrics.
        """
        if record.cost is None and record.charged:
            record.charge(-record.charged)
        answered = AccessRecord(
            time.time(),
            record.identity.decode("ascii"),
            record.method,
            record.route or OTHER_ROUTE,
            record.model,
            status,
            time.monotonic() - record.arrived,
            record.cost,
            record.error,
            record.rejection,
            record.is_bulk,
            record.client,
            record.key.name if record.key is not None else "",
        )
        self._metrics.observe_request(answered)
        if record.trace is not None:
            record.trace.end(answered)
        self._access_log.add(answered)
