"""What happens around every request: its id, its observation, the size of its headers, its route.

Knows no task and no protocol.
"""

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

import orjson
from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.core import ServiceError
from service.metrics import Metrics

OTHER_ROUTE = "other"
"""The label of requests to unknown routes, so that labels stay bounded."""

_MAX_HEADER_BYTES = 65_536

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class Connection:
    """ASGI middleware: gives a request its id and reports its route, model, status and time.

    Args:
        app: the application inside.
        known_routes: paths that may become labels.
        metrics: observes every answered request.
    """

    def __init__(self, app: ASGIApp, known_routes: Collection[str], metrics: Metrics) -> None:
        self._app = app
        self._known_routes = frozenset(known_routes)
        self._metrics = metrics

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
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            route = scope["path"] if scope["path"] in self._known_routes else OTHER_ROUTE
            seconds = time.perf_counter() - started
            self._metrics.observe_request(route, scope.get("cloze.model", ""), status, seconds)


class DirectRoutes:
    """ASGI middleware: calls the handlers of POST routes without the router and its middleware.

    Every other request goes to the router. `docs/decisions/0007` has the measured difference.

    Args:
        app: the application inside.
        handlers: by path.
        respond: answers a `ServiceError` of a handler.
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
    """The client's own, if it is harmless in a header; else a random one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return bytes(value)
    return secrets.token_hex(8).encode()


class BoundedHeaders(HttpToolsProtocol):
    """uvicorn's protocol, which by itself would collect headers for as long as a client sends them."""

    _idle_bytes = 0
    _progress = False

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._progress = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its headers are whole."""
        self._progress = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Its end."""
        self._progress = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Bytes came. Those that bring no request on its way are headers or trailers, and counted."""
        self._progress = False
        super().data_received(data)
        if self._progress:
            self._idle_bytes = 0
        else:
            self._idle_bytes += len(data)
            if self._idle_bytes > _MAX_HEADER_BYTES:
                error = f"the request's headers have more than {_MAX_HEADER_BYTES} bytes, the limit"
                body = orjson.dumps({"error": error, "error_type": "Validation"})
                head = f"HTTP/1.1 431 \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
                self.transport.write(head.encode() + body)
                self.transport.close()
