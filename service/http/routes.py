"""Routes, and how their requests are answered and recorded."""

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloze.service.core import Queue
from cloze.service.http.body import RequestLimits
from cloze.service.http.bytes_held import SMALL_BYTES
from cloze.service.http.record import RECORD
from cloze.service.observe.logs import AccessLog
from cloze.service.observe.metrics import Metrics
from cloze.service.observe.tracing import Tracing
from cloze.service.request import ServedRequest

JSON = "application/json"
RAW = "application/octet-stream"
NPY = "application/x-npy"
TEXT = "text/plain"
HTML = "text/html"

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; a large body in parts, each when the client has read the others."""
        if len(self.body) <= SMALL_BYTES:
            await super().__call__(scope, receive, send)
            return
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        for first in range(0, len(self.body), SMALL_BYTES):
            part, end = self.body[first : first + SMALL_BYTES], first + SMALL_BYTES
            message = {"body": part, "more_body": end < len(self.body)}
            await send({"type": "http.response.body", **message})


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


class Paths:
    """The paths of a set of routes.

    A path is never decoded: ``/%65mbed`` is another path than ``/embed``, and no route. So whatever
    reads the path (the gate, the access control, the router, the metrics, and a proxy's rules
    before them) reads the same one.

    Args:
        routes: paths of routes. A part in braces stands for any text without a slash.
    """

    def __init__(self, routes: Iterable[str]) -> None:
        self._routes = frozenset(routes)
        self._patterns = {
            route: re.compile("[^/]+".join(map(re.escape, re.split(r"\{.*?\}", route))))
            for route in self._routes
            if "{" in route
        }

    def route(self, path: str) -> str | None:
        """Return the route of a path; None if there is none."""
        if path in self._routes:
            return path
        return next((route for route, p in self._patterns.items() if p.fullmatch(path)), None)


class Recorder:
    """Records the requests of one process: their metrics, their spans and their log lines.

    Args:
        tracing: makes the spans of requests; None: there are none.
        limits: the limits of the requests.
        respond: returns the response to an error that nothing else has handled.
        is_ending: returns whether each connection is to end with its next answer.
    """

    def __init__(
        self,
        metrics: Metrics,
        access_log: AccessLog,
        tracing: Tracing | None,
        limits: RequestLimits,
        respond: Respond,
        is_ending: Callable[[], bool],
    ) -> None:
        self._metrics, self._access_log, self._tracing = metrics, access_log, tracing
        self._limits, self._respond, self._is_ending = limits, respond, is_ending

    async def answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Let an application answer a request, add its id and its model, and record the answer."""
        record: ServedRequest = scope[RECORD]
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
                # A client that asks whether to send its body may send it or not after a refusal.
                if self._is_ending() or (record.received == 0 and b"expect" in record.first):
                    message["headers"].append((b"connection", b"close"))
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
            self._limits.sent(record)
            self.add(record, status or 500)

    def add(self, request: ServedRequest, status: int) -> None:
        """Record a request that is answered with a status.

        A request without a result costs its key no tokens, as it adds none to the metrics.
        """
        if request.tokens and not request.texts:
            if request.key is not None:
                request.key.take_tokens(-request.tokens, time.monotonic())
            request.tokens = 0
        request.status = status
        request.ended, request.seconds = time.time(), time.monotonic() - request.arrived
        self._metrics.observe_request(request)
        if request.trace is not None:
            request.trace.end(request)
        # The access log keeps the request for longer than its connection and its span.
        request.trace = request.usage = request.connection = None
        self._access_log.add(request)
