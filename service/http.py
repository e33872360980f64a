"""What happens around every route: ids, observation, bounded bodies, the short way to hot ones, clients that went away.

Knows no task.
"""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager

import orjson
from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.core import ClientGone, RequestTooLarge, ServiceError, SlowRequest

OTHER_ROUTE = "other"
"""How a request to no route of ours is labelled, so that labels stay bounded."""

_WATCH_AFTER_S = 0.05
"""Most requests are answered sooner; only the others pay for a task that watches their connection."""

_DISCARD_FACTOR = 8
"""How many times the limit of an oversized body is read and thrown away, so that its client hears why."""

_MAX_HEADER_BYTES = 65_536

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class Connection:
    """ASGI middleware: gives a request its id and reports its route, model, status and time.

    Args:
        app: what it wraps.
        known_routes: paths that may become labels.
        observe: told (route, model, status, seconds) of every answered request.
    """

    def __init__(self, app: ASGIApp, known_routes: Collection[str], observe: Callable[[str, str, int, float], None]) -> None:
        self._app = app
        self._known_routes = frozenset(known_routes)
        self._observe = observe

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
            self._observe(route, scope.get("cloze.model", ""), status, time.perf_counter() - started)


class DirectRoutes:
    """ASGI middleware: answers POST on its routes by itself, before the router, whose way to them costs more than theirs.

    Everything else, and so every other method of these routes, is the router's.

    Args:
        app: what it wraps.
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
        handler = self._handlers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
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
                head = (
                    f"HTTP/1.1 431 \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
                )
                self.transport.write(head.encode() + body)
                self.transport.close()


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
        RequestTooLarge: it has more than ``limit`` bytes.
        SlowRequest: it has not arrived after ``timeout_s``.
    """
    chunks: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(timeout_s):
            while more and size <= limit * _DISCARD_FACTOR:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client closed its connection before its body was whole")
                chunk, more = message.get("body", b""), message.get("more_body", False)
                size += len(chunk)
                if size <= limit:
                    chunks.append(chunk)
    except TimeoutError:
        raise SlowRequest(f"{size} bytes of the body arrived within the limit of {timeout_s * 1000:.0f} ms, not all") from None
    if size > limit:
        declared = request.headers.get("content-length", "")
        raise RequestTooLarge(f"the body has {declared or f'at least {size}'} bytes; the limit is {limit}")
    return b"".join(chunks)


@asynccontextmanager
async def client_gone(request: Request) -> AsyncIterator[None]:
    """Cancel what is awaited inside when the client closes its connection.

    Raises:
        ClientGone: it did.
    """
    gone = False
    watcher: asyncio.Task[None] | None = None
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    def start_watching() -> None:
        nonlocal watcher
        watcher = asyncio.create_task(watch())

    timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, start_watching)
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise ClientGone("the client closed its connection") from None
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
