"""The least HTTP/1.1 client: one keep-alive connection, one request at a time, prebuilt bytes.

A load generator shares the cores with what it measures. A request costs this client about a tenth of what it costs a general
one, so that what is measured is the server.
"""

import asyncio
from dataclasses import dataclass
from typing import Self, cast
from urllib.parse import urlsplit

import httptools


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole response."""

    status: int
    body: bytes


def post(path: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """The bytes of a request, made once and sent often."""
    lines = [
        f"POST {path} HTTP/1.1",
        "host: bench",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Connection(asyncio.Protocol):
    """One connection to a server."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._waiter: asyncio.Future[Reply] | None = None
        self._transport: asyncio.Transport | None = None
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open = False

    @classmethod
    async def to(cls, url: str) -> Self:
        """Connect.

        Raises:
            OSError: nobody listens there.
        """
        parts = urlsplit(url)
        _, connection = await asyncio.get_running_loop().create_connection(
            cls, parts.hostname or "", parts.port or 80
        )
        return connection

    async def send(self, request: bytes) -> Reply:
        """Send a request and wait for the whole response.

        Raises:
            ConnectionError: the connection ended first.
        """
        if self._transport is None or not self.open:
            raise ConnectionResetError("the server has closed the connection")
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._waiter

    async def close(self) -> None:
        """End it; returns when it has ended."""
        if self._transport is not None:
            self._transport.close()
            await asyncio.shield(self._lost)

    # ---- asyncio's and the parser's callbacks ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport, self.open = (
            cast(asyncio.Transport, transport),
            True,
        )  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.open = False
        if not self._lost.done():
            self._lost.set_result(None)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(
                ConnectionResetError(f"the connection ended before the answer ({exc})")
            )

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        body, self._body = b"".join(self._body), []
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Reply(self._parser.get_status_code(), body))
