"""A minimal HTTP/1.1 client: one keep-alive connection, one request at a time, prebuilt bytes.

A load generator shares the cores with the server that it measures. A request costs this client
about a tenth of what it costs a general HTTP client, so the figures describe the server.
"""

import asyncio
from dataclasses import dataclass
from typing import Self, cast
from urllib.parse import urlsplit

import httptools


@dataclass(frozen=True, slots=True)
class Request:
    """A request to send.

    Attributes:
        data: the bytes, as `post` returns them.
        group: what the request belongs to, for its sender.
    """

    data: bytes
    texts: int = 1
    group: str = ""


@dataclass(frozen=True, slots=True)
class Response:
    """A complete response."""

    status: int
    body: bytes


def post(path: str, body: bytes) -> bytes:
    """Return the bytes of a POST request with a JSON body."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


class Connection(asyncio.Protocol):
    """One connection to a server."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._response: asyncio.Future[Response] | None = None
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open = False

    @classmethod
    async def connect(cls, url: str) -> Self:
        """Open a connection.

        Raises:
            OSError: no server listens at the URL.
        """
        parts = urlsplit(url)
        _, connection = await asyncio.get_running_loop().create_connection(
            cls, parts.hostname or "", parts.port or 80
        )
        return connection

    async def send(self, request: bytes) -> Response:
        """Send a request and wait for the complete response.

        Raises:
            ConnectionError: the connection closed first.
        """
        if self._transport is None or not self.open:
            raise ConnectionResetError("the server has closed the connection")
        self._response = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._response

    def close_soon(self) -> None:
        """Close the connection, and do not wait until it is closed."""
        if self._transport is not None:
            self._transport.close()

    async def close(self) -> None:
        """Close the connection and wait until the connection is closed."""
        self.close_soon()
        if self._transport is not None:
            await asyncio.shield(self._closed)

    # ---- callbacks of asyncio and of the parser ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; see `asyncio.Protocol`."""
        # uvloop's transport is no subclass of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes; see `asyncio.Protocol`."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the pending request; see `asyncio.Protocol`."""
        self.open = False
        if not self._closed.done():
            self._closed.set_result(None)
        if self._response is not None and not self._response.done():
            self._response.set_exception(
                ConnectionResetError(f"the connection ended before the answer ({exc})")
            )

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body; see httptools."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Return the response to the caller of `send`; see httptools."""
        if not self._parser.should_keep_alive():  # the server ends the connection
            self.open = False
        body, self._body = b"".join(self._body), []
        if self._response is not None and not self._response.done():
            self._response.set_result(Response(self._parser.get_status_code(), body))
