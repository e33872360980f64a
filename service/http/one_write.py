"""Writes the head of an answer and its body at once.

uvicorn writes them one after the other: two system calls and two packets for each small answer. A
process that was killed between them left half an answer, which a balancer cannot send again to
another replica.
"""

import asyncio
from typing import Final

_LARGE: Final = 65_536
"""A body of more bytes is not copied behind its head."""

_CONTINUE: Final = b"HTTP/1.1 100 "


class OneWrite:
    """The transport of one request; it holds the head of its answer until the body follows.

    Not for HEAD: no body follows.

    Args:
        transport: the transport of the connection.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None  # None: not written yet; empty: written

    def write(self, data: bytes) -> None:
        """Hold the head, or write a part of the body; see `asyncio.WriteTransport`."""
        if self._head is None:
            if data.startswith(_CONTINUE):
                self._transport.write(data)
            else:
                self._head = data
            return
        if self._head and len(data) <= _LARGE:
            data, self._head = self._head + data, b""
        self._flush()
        self._transport.write(data)

    def is_closing(self) -> bool:
        """Whether the connection is closed; see `asyncio.BaseTransport`."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Write a held head and close the connection; see `asyncio.BaseTransport`."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""
