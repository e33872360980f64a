"""Bounds the memory of answers that clients have not read.

A large answer is written only when there is room for it. A connection that reads its answer too
slowly is closed; `pace` has the rates.
"""

from typing import Protocol

from cloze.service.http.memory_limit import SMALL_BYTES, Hold, MemoryLimit
from cloze.service.http.pace import Pace

CONNECTION = "cloze.connection"
"""Key of a scope: the connection that the request came by, a `Reader`."""

_WRITERS = 3
"""Most large answers that are decoded, written, or wait for room, at once; of one client two.

Decoding needs the interpreter, so more of them at once would need more memory and no less time.
"""


class Reader(Protocol):
    """A connection whose client reads an answer."""

    def unread_bytes(self) -> int:
        """Return how many bytes of answers wait in this process."""
        ...

    def unsent_bytes(self) -> int:
        """Return how many bytes of answers wait in this process and in the kernel."""
        ...

    def end(self, reason: str) -> None:
        """Close the connection."""
        ...


class _Unread:
    """The answers that a connection has still to read.

    Args:
        reader: the connection.
        holder: the client of its first answer.
    """

    def __init__(self, reader: Reader, holder: str) -> None:
        self.holder = holder
        self.holds: list[Hold] = []
        self._reader = reader
        self._left = 0

    def add(self, hold: Hold) -> None:
        """Note that a further answer waits for the client."""
        self.holds.append(hold)
        self._left = self._reader.unsent_bytes()

    def moved_bytes(self) -> int:
        """Return the bytes that the client has read since the last call; see `Transfer`."""
        before, self._left = self._left, self._reader.unsent_bytes()
        return max(0, before - self._left)

    def slowed(self) -> None:
        """Do nothing: an unread answer holds its bytes; see `Transfer`."""

    def end_slow(self) -> None:
        """Close the connection; see `Transfer`."""
        self._reader.end("it reads its answer too slowly")


class Answers:
    """The answers of one process that are written or not yet read.

    Args:
        most: bytes of all large answers; one client has half of them at most.
    """

    def __init__(self, most: int) -> None:
        self._memory = MemoryLimit("unread answers", most)
        self._writers = MemoryLimit("large answers", _WRITERS)
        self._pace = Pace(self._memory)
        self._unread: dict[Reader, _Unread] = {}

    async def begin(self, client: str) -> Hold:
        """Wait until a large answer may be decoded and written; `done` must follow."""
        turn = Hold(client)
        await self._writers.grow(turn, 1)
        return turn

    def done(self, turn: Hold) -> None:
        """Note that a large answer is written and held, or given up."""
        self._writers.shrink(turn)

    async def hold(self, client: str, size: int, *, waits: bool) -> Hold | None:
        """Hold the bytes of an answer until `sent`.

        Args:
            client: the client that gets the answer.
            size: the bytes.
            waits: whether to wait for room.

        Returns:
            What the answer holds; None for a small answer.
        """
        if size <= SMALL_BYTES:
            return None
        hold = Hold(client)
        if waits:
            await self._memory.grow(hold, size)
        else:
            self._memory.grow_now(hold, size)
        return hold

    def sent(self, reader: Reader | None, hold: Hold) -> None:
        """Release the bytes of an answer when the client has read it.

        Args:
            reader: the connection; None: it is closed.
            hold: what `hold` returned.
        """
        if reader is None or not reader.unread_bytes():
            self._memory.shrink(hold)
            return
        if (unread := self._unread.get(reader)) is None:
            unread = self._unread[reader] = _Unread(reader, hold.client)
            self._pace.add(unread)
        unread.add(hold)

    def was_read(self, reader: Reader) -> None:
        """Note that a client has read its answers, or that its connection is closed."""
        if (unread := self._unread.pop(reader, None)) is not None:
            self._pace.remove(unread)
            for hold in unread.holds:
                self._memory.shrink(hold)

    def is_reading(self, reader: Reader) -> bool:
        """Whether a client still has to read an answer; it is closed if it stops."""
        return reader in self._unread
