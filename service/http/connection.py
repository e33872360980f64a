"""ASGI middleware around every request, and the limit on the size of headers."""

import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

import orjson
from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cloze.service.core import ServiceError
from cloze.service.http.access_log import AccessLog, AccessRecord
from cloze.service.metrics import Metrics

log = logging.getLogger("cloze")

OTHER_ROUTE = "other"
"""Metric label of requests to unknown routes, so that the number of labels is bounded."""

_MAX_HEADER_BYTES = 65_536
"""Most bytes of the headers of a request."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
"""Request ids that the server accepts from a client and returns in a header."""


class Connection:
    """ASGI middleware that assigns request ids, and records route, model, status and time.

    Args:
        app: the wrapped application.
        known_routes: paths that may become metric labels.
        metrics: the metrics that record every answered request.
        access_log: the log of answered requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        known_routes: Collection[str],
        metrics: Metrics,
        access_log: AccessLog,
    ) -> None:
        self._app = app
        self._known_routes = frozenset(known_routes)
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _request_id(scope)
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                if model := scope.get("cloze.model"):
                    message["headers"].append((b"x-model", model.encode("ascii")))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            route = scope["path"] if scope["path"] in self._known_routes else OTHER_ROUTE
            seconds = time.perf_counter() - started
            model = scope.get("cloze.model", "")
            self._metrics.observe_request(route, model, status, seconds)
            self._access_log.add(
                AccessRecord(
                    time.time(),
                    request_id.decode("ascii"),
                    scope["method"],
                    route,
                    model,
                    status,
                    seconds,
                    scope.get("cloze.cost"),
                    scope.get("cloze.error", ""),
                )
            )


class DirectRoutes:
    """ASGI middleware that calls the handlers of POST routes directly, without the router.

    Every other request goes to the router. `docs/decisions/0007` has the measured difference.

    Args:
        app: the wrapped application.
        handlers: the handlers of POST routes by path.
        respond: returns the response to a `ServiceError` of a handler.
    """

    def __init__(
        self,
        app: ASGIApp,
        handlers: Mapping[str, Callable[[Request], Awaitable[Response]]],
        respond: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app, self._handlers, self._respond = app, handlers, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        handler = (
            self._handlers.get(scope["path"])
            if scope["type"] == "http" and scope["method"] == "POST"
            else None
        )
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await handler(request)
        except ServiceError as error:
            response = await self._respond(request, error)
        await response(scope, receive, send)


def _request_id(scope: Scope) -> bytes:
    """Return the client's request id if it matches `_REQUEST_ID`, else a random id."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return bytes(value)
    return b"%016x" % random.getrandbits(64)


class BoundedHeaders(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with a limit on the size of a request's headers.

    uvicorn has no such limit. The class counts the bytes that arrive without a parser event: these
    bytes belong to headers or trailers. Beyond the limit the class answers 431 and closes.
    """

    _header_bytes = 0
    _progress = False

    def on_message_begin(self) -> None:
        """Note the first byte of a request."""
        self._progress = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Note the end of the headers."""
        self._progress = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Note a part of the body."""
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of the request."""
        self._progress = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and count them if they cause no parser event."""
        self._progress = False
        super().data_received(data)
        if self._progress:
            self._header_bytes = 0
            return
        self._header_bytes += len(data)
        if self._header_bytes > _MAX_HEADER_BYTES:
            self._refuse_headers()

    def _refuse_headers(self) -> None:
        log.warning("a request was refused: its headers have more than %d bytes", _MAX_HEADER_BYTES)
        error = f"the request's headers have more than {_MAX_HEADER_BYTES} bytes, the limit"
        body = orjson.dumps({"error": error, "error_type": "Validation"})
        head = (
            "HTTP/1.1 431 \r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
