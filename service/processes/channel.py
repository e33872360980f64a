"""Messages over a Unix stream socket, with end of file as the death of the peer.

On the wire, the length of a message in bytes, as an unsigned 32-bit integer, precedes it.
"""

import asyncio
import logging
import struct
from abc import ABC, abstractmethod
from typing import cast

log = logging.getLogger("cloze")

MAX_MESSAGE_BYTES = 2**30
"""A longer message is malformed. The largest request that the defaults admit has 9 MB."""

MAX_UNSENT_BYTES = 2**28
"""What a peer may leave unread: about 40 of the largest results that the defaults admit."""

_LENGTH = struct.Struct("=I")


class Channel(asyncio.Protocol, ABC):
    """One connection at a time. All methods run on the event loop.

    Args:
        peer: a name of the other process, for the log.
        max_unsent_bytes: a peer that leaves more unread is dropped.
    """

    def __init__(self, peer: str, max_unsent_bytes: int = MAX_UNSENT_BYTES) -> None:
        self.peer = peer
        self._max_unsent_bytes = max_unsent_bytes
        self._transport: asyncio.Transport
        self._partial: bytearray  # of a message whose end has not arrived
        self._needed = _LENGTH.size  # bytes of that message

    @abstractmethod
    def received(self, message: memoryview) -> None:
        """Handle a message. An exception drops the peer."""

    @abstractmethod
    def lost(self) -> None:
        """Handle the end of the connection; called once."""

    def send(self, message: bytes) -> None:
        """Send a message without waiting. Drop the peer if too many bytes are unsent."""
        if self._transport.is_closing():
            return
        unsent = self._transport.get_write_buffer_size()
        if unsent > self._max_unsent_bytes:
            self.drop(f"{unsent} bytes are unread, more than the limit of {self._max_unsent_bytes}")
            return
        self._transport.writelines([_LENGTH.pack(len(message)), message])

    def drop(self, reason: str) -> None:
        """Close the connection at once and discard what is unsent."""
        log.error("the connection to %s is closed: %s", self.peer, reason)
        self._transport.abort()

    def close(self) -> None:
        """Close the connection after what is unsent."""
        self._transport.close()

    # ---- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._partial = bytearray()
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """See `asyncio.Protocol`."""
        if self._partial:
            log.warning("%s disconnected in the middle of a message", self.peer)
        self.lost()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        view = memoryview(data)
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return
            view, self._partial = memoryview(self._partial), bytearray()
        try:
            rest = self._receive_all(view)
        except Exception as error:  # the peer's next bytes cannot be trusted either
            self.drop(f"a malformed message ({type(error).__name__}: {error})")
            return
        self._partial += rest

    def _receive_all(self, data: memoryview) -> memoryview:
        """Handle every complete message; return the beginning of the next one."""
        while len(data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"{length} bytes, more than the limit of {MAX_MESSAGE_BYTES}")
            self._needed = _LENGTH.size + length
            if len(data) < self._needed:
                return data
            self.received(data[_LENGTH.size : self._needed])
            data = data[self._needed :]
            if self._transport.is_closing():  # dropped while the message was handled
                return data[:0]
        self._needed = _LENGTH.size
        return data
