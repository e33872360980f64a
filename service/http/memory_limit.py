"""Bounds the memory of what requests send and get, so that many large ones cannot exhaust it.

A request needs memory in proportion to its body: for the parsed texts, their tokens and their
encodings. Its answer needs memory until the client has read it. docs/reliability.md has what was
measured.

Bodies and answers are transfers, and one that is too slow is ended. A transfer must move `RATE`
bytes per second, and `HURRIED_RATE` while others wait for the memory that its client holds. Each
rate has a time of grace: a transfer may stand still for that long, and gains the time back by
moving faster, as with Apache's mod_reqtimeout.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from cloze.service.core import Overloaded, Rejection

SMALL_BYTES = 65_536
"""Bodies and answers up to this size are not counted; the number of connections bounds them."""

RATE = 1_000
GRACE_S = 10.0
HURRIED_RATE = 65_536
HURRIED_GRACE_S = 1.0

_TICK_S = 0.25

_WRITERS = 3
"""Most large answers that are decoded, written, or wait for room, at once; of one client two.

Decoding needs the interpreter, so more of them at once would need more memory and no less time.
"""


@dataclass(slots=True, eq=False)
class Hold:
    """What one body or one answer of a client holds of a `MemoryLimit`."""

    client: str
    size: int = 0


@dataclass(slots=True, eq=False)
class _Waiter:
    """A hold that waits until it can grow by some bytes."""

    hold: Hold
    more: int
    decided: asyncio.Future[None]  # also cancelled, by the task that waits
    has_grown: bool = False


def _size(waiter: _Waiter) -> int:
    return waiter.hold.size


@dataclass(slots=True)
class _Line:
    """The holds of one client that wait: those that hold a part already, and the others."""

    growing: dict[_Waiter, None] = field(default_factory=dict)  # few: each has `SMALL_BYTES`
    beginning: dict[_Waiter, None] = field(default_factory=dict)

    def place(self, waiter: _Waiter) -> dict[_Waiter, None]:
        """Return where a hold waits."""
        return self.growing if waiter.hold.size else self.beginning

    @property
    def first(self) -> _Waiter:
        """The hold that is nearest to its end, else the one that has waited for longest."""
        return max(self.growing, key=_size, default=None) or next(iter(self.beginning))


class MemoryLimit:
    """The bytes that a process may hold at once for one purpose. One client holds half at most.

    What waits for room gets it in the order of the bytes that its client holds, the least first. Of
    one client, what holds most goes first. If all that is held is of holds that wait to grow, one
    of them is refused, so that the others can.

    Args:
        what: what holds the bytes, in the plural, for errors.
        most: bytes in all; a hold that would need more than half of them gets half.
        max_wait_s: longest wait for room; 0: no limit.
    """

    def __init__(self, what: str, most: int, max_wait_s: float = 0.0) -> None:
        self._what, self._most, self._max_wait_s = what, most, max_wait_s
        self._share = most - most // 2
        self._held = 0
        self._by_client: Counter[str] = Counter()
        self._lines: dict[str, _Line] = {}  # by client; none is empty

    async def grow(self, hold: Hold, size: int) -> None:
        """Wait until there is room, and let a hold have ``size`` bytes.

        Raises:
            Overloaded: there was no room in time, or other holds can grow only without this one.
        """
        more = min(size, self._share) - hold.size
        if more <= 0:
            return
        waiter = _Waiter(hold, more, asyncio.get_running_loop().create_future())
        self._lines.setdefault(hold.client, _Line()).place(waiter)[waiter] = None
        self._wake()
        try:
            async with asyncio.timeout(self._max_wait_s or None):
                await waiter.decided
        except (TimeoutError, asyncio.CancelledError) as error:
            line = self._lines.get(hold.client)
            if waiter.has_grown:
                self.shrink(hold, hold.size - waiter.more)
            elif line is not None and waiter in line.place(waiter):
                self._leave(waiter)
                self._wake()
            if isinstance(error, TimeoutError):
                raise self._refusal(waiter) from None
            raise

    def grow_now(self, hold: Hold, size: int) -> None:
        """Let a hold have ``size`` bytes even if there is no room."""
        self._add(hold, size - hold.size)

    def shrink(self, hold: Hold, size: int = 0) -> None:
        """Release what a hold has above ``size`` bytes."""
        if hold.size > size:
            self._add(hold, size - hold.size)
            self._wake()

    def crowding(self) -> set[str]:
        """Return the clients for whose memory others wait; they must hurry.

        Those are clients that wait for room in their own share and, if the whole memory is full,
        clients that hold at least the average.
        """
        fitting = {waiter.hold.client for waiter in self._fitting()}
        crowding = self._lines.keys() - fitting
        if fitting or self._held > self._most:
            clients = len(self._lines.keys() | self._by_client.keys())
            held = self._by_client.items()
            crowding |= {client for client, size in held if size * clients >= self._held}
        return crowding

    def _add(self, hold: Hold, more: int) -> None:
        hold.size += more
        self._held += more
        self._by_client[hold.client] += more
        if not self._by_client[hold.client]:
            del self._by_client[hold.client]

    def _fitting(self) -> list[_Waiter]:
        """Return the first of each client's line whose share has room for it."""
        firsts = (line.first for line in self._lines.values())
        return [w for w in firsts if self._by_client[w.hold.client] + w.more <= self._share]

    def _leave(self, waiter: _Waiter) -> None:
        line = self._lines[waiter.hold.client]
        del line.place(waiter)[waiter]
        if not line.growing and not line.beginning:
            del self._lines[waiter.hold.client]

    def _refusal(self, waiter: _Waiter) -> Overloaded:
        own, more = self._by_client[waiter.hold.client], waiter.more
        whose, held, limit = "all clients", self._held, f"the limit of {self._most}"
        if own + more > self._share:
            whose, held, limit = "this client", own, f"its share of {self._share}"
        holding = f"the {self._what} of {whose} hold {held} bytes"
        message = f"{holding}; with {more} more they would pass {limit}"
        return Overloaded(message, 1, Rejection.MEMORY)

    def _wake(self) -> None:
        """Let the holds that wait grow, as far as there is room."""
        while fitting := self._fitting():
            waiter = min(fitting, key=lambda waiter: self._by_client[waiter.hold.client])
            if self._held + waiter.more > self._most:
                break
            self._leave(waiter)
            self._add(waiter.hold, waiter.more)
            waiter.has_grown = True
            if not waiter.decided.done():
                waiter.decided.set_result(None)
        if self._lines:
            self._break_deadlock(fitting)

    def _break_deadlock(self, fitting: list[_Waiter]) -> None:
        """Refuse a hold if the others can grow only without it.

        Args:
            fitting: the firsts of lines for which the whole memory, not a share, has no room.
        """
        # Bytes that are released only if a hold of the line gets what it waits for.
        stuck = {client: sum(map(_size, line.growing)) for client, line in self._lines.items()}
        if fitting and sum(stuck.values()) == self._held:
            client = max(stuck, key=stuck.__getitem__)
        else:
            waiting_for_all = {waiter.hold.client for waiter in fitting}
            for client, size in stuck.items():
                if client not in waiting_for_all and size == self._by_client[client]:
                    break
            else:
                return
        waiter = min(reversed(self._lines[client].growing), key=_size)  # it loses least
        self._leave(waiter)
        if not waiter.decided.done():
            waiter.decided.set_exception(self._refusal(waiter))


# ---- transfers -----------------------------------------------------------------------------------


class Transfer(Protocol):
    """A body or an answer on its way."""

    @property
    def holder(self) -> str | None:
        """The client whose memory the transfer holds; None: it holds none."""

    def moved_bytes(self) -> int | None:
        """Return the bytes since the last call; None: the transfer waits for this server."""

    def slowed(self) -> None:
        """Note that the transfer is slower than `HURRIED_RATE`."""

    def end_slow(self) -> None:
        """End the transfer, which is too slow."""


@dataclass(slots=True)
class _Grace:
    """For how many seconds a transfer may stand still, by each of the rates."""

    seconds: float = GRACE_S
    hurried_s: float = HURRIED_GRACE_S


class Pace:
    """The transfers of one process that take longer than a moment, and hold a memory."""

    def __init__(self, memory: MemoryLimit) -> None:
        self._memory = memory
        self._transfers: dict[Transfer, _Grace] = {}
        self._ticking = False

    def add(self, transfer: Transfer) -> None:
        """Begin to watch a transfer."""
        self._transfers[transfer] = _Grace()
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def remove(self, transfer: Transfer) -> None:
        """End the watch of a transfer, which may have none."""
        self._transfers.pop(transfer, None)

    def _tick(self) -> None:
        """End the transfers that are too slow. A late tick counts as one tick."""
        crowding: set[str | None] = {*self._memory.crowding()}
        for transfer, grace in list(self._transfers.items()):
            if (moved := transfer.moved_bytes()) is None:
                continue
            grace.seconds = min(GRACE_S, grace.seconds + moved / RATE - _TICK_S)
            gained_s = moved / HURRIED_RATE - _TICK_S
            grace.hurried_s = max(0.0, min(HURRIED_GRACE_S, grace.hurried_s + gained_s))
            if not grace.hurried_s:
                transfer.slowed()
            if grace.seconds <= 0 or (not grace.hurried_s and transfer.holder in crowding):
                transfer.end_slow()
        self._ticking = bool(self._transfers)
        if self._ticking:
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)


# ---- answers -------------------------------------------------------------------------------------


class Reader(Protocol):
    """A connection whose client reads answers."""

    address: str

    def unread_bytes(self) -> int:
        """Return the bytes of answers that wait in this process."""

    def unsent_bytes(self) -> int:
        """Return the bytes of answers that wait in this process and in the kernel."""

    def end(self, reason: str) -> None:
        """Close the connection."""


@dataclass(slots=True, eq=False)
class _Unread:
    """The answers that a connection has still to read; its holder is the client of the first."""

    reader: Reader
    holder: str
    holds: list[Hold] = field(default_factory=list)
    left: int = 0

    def moved_bytes(self) -> int:
        """Return the bytes that the client has read since the last call; see `Transfer`."""
        before, self.left = self.left, self.reader.unsent_bytes()
        return max(0, before - self.left)

    def slowed(self) -> None:
        """Do nothing: an unread answer holds its bytes; see `Transfer`."""

    def end_slow(self) -> None:
        """Close the connection; see `Transfer`."""
        self.reader.end("it reads its answer too slowly")


class UnreadAnswers:
    """The answers of one process that are written or not yet read, of ``most`` bytes at most."""

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
        """Hold the bytes of a client's answer until `sent`; None: the answer is small."""
        if size <= SMALL_BYTES:
            return None
        hold = Hold(client)
        if waits:
            await self._memory.grow(hold, size)
        else:
            self._memory.grow_now(hold, size)
        return hold

    def sent(self, reader: Reader | None, hold: Hold) -> None:
        """Release the bytes of an answer when its client has read it, or has gone (None)."""
        if reader is None or not reader.unread_bytes():
            self._memory.shrink(hold)
            return
        if (unread := self._unread.get(reader)) is None:
            unread = self._unread[reader] = _Unread(reader, hold.client)
            self._pace.add(unread)
        unread.holds.append(hold)
        unread.left = reader.unsent_bytes()

    def was_read(self, reader: Reader) -> None:
        """Note that a client has read its answers, or that its connection is closed."""
        if (unread := self._unread.pop(reader, None)) is not None:
            self._pace.remove(unread)
            for hold in unread.holds:
                self._memory.shrink(hold)

    def is_reading(self, reader: Reader) -> bool:
        """Whether a client still has to read an answer; it is closed if it stops."""
        return reader in self._unread
