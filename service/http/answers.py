"""Bounds the memory of answers that clients have not read.

A large answer is written only when there is room for it. A connection that does not read its answer
is closed: after 10 s, and after 1 s if others wait for the room.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from cloze.service.http.memory_limit import MemoryLimit

CONNECTION = "cloze.connection"
"""Key of a scope: the connection that the request came by, a `Reader`."""

_WRITERS = 2
"""Most large answers that are decoded, written, or wait for room, at once.

Decoding needs the interpreter, so more of them at once would need more memory and no less time.
"""

_TICK_S = 0.5
_STALL_S = 10.0
_STALL_WHILE_FULL_S = 1.0


class Reader(Protocol):
    """A connection whose client reads an answer."""

    def unread_bytes(self) -> int:
        """Return how many bytes of answers wait in this process."""
        ...

    def end(self, reason: str) -> None:
        """Close the connection."""
        ...


@dataclass(slots=True)
class _Unread:
    """What a connection holds, its unread bytes, and for how long they have not changed."""

    held: int
    bytes: int
    stalled_s: float = 0.0


class Answers:
    """The answers of one process that are written or not yet read.

    Args:
        most: bytes of all large answers; a larger one is held alone.
    """

    def __init__(self, most: int) -> None:
        self._memory = MemoryLimit("unread answers", most)
        self._writers = asyncio.Semaphore(_WRITERS)
        self._unread: dict[Reader, _Unread] = {}
        self._ticking = False

    async def begin(self) -> None:
        """Wait until a large answer may be decoded and written; `done` must follow."""
        await self._writers.acquire()

    def done(self) -> None:
        """Note that a large answer is written and held, or given up."""
        self._writers.release()

    async def hold(self, size: int, *, waits: bool) -> int:
        """Hold the bytes of an answer until `sent`.

        Args:
            size: the bytes.
            waits: whether to wait for room.

        Returns:
            The held bytes, 0 for a small answer.
        """
        return await self._memory.hold(size) if waits else self._memory.hold_now(size)

    def sent(self, reader: Reader | None, held: int) -> None:
        """Release the held bytes of an answer when the client has read it.

        Args:
            reader: the connection; None: it is closed.
            held: what `hold` returned.
        """
        if reader is None or not reader.unread_bytes():
            self._memory.release(held)
            return
        if (unread := self._unread.get(reader)) is not None:
            unread.held += held
            return
        self._unread[reader] = _Unread(held, reader.unread_bytes())
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def was_read(self, reader: Reader) -> None:
        """Note that a client has read its answers, or that its connection is closed."""
        if (unread := self._unread.pop(reader, None)) is not None:
            self._memory.release(unread.held)

    def is_reading(self, reader: Reader) -> bool:
        """Whether a client still has to read an answer; it is closed if it stops."""
        return reader in self._unread

    def _tick(self) -> None:
        """Close the connections that have read nothing for too long."""
        longest_s = _STALL_WHILE_FULL_S if self._memory.is_full else _STALL_S
        for reader, unread in list(self._unread.items()):
            left = reader.unread_bytes()
            unread.stalled_s = unread.stalled_s + _TICK_S if left == unread.bytes else 0.0
            unread.bytes = left
            if unread.stalled_s >= longest_s:
                reader.end("it does not read its answer")
        self._ticking = bool(self._unread)
        if self._ticking:
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)
