"""Ends transfers that are too slow: bodies that arrive, and answers that clients read.

A transfer must move `RATE` bytes per second, and `HURRIED_RATE` while others wait for the memory
that its client holds. Each rate has a time of grace: a transfer may stand still for that long, and
gains the time back by moving faster, as with Apache's mod_reqtimeout.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from cloze.service.http.memory_limit import MemoryLimit

RATE = 1_000
GRACE_S = 10.0
HURRIED_RATE = 65_536
HURRIED_GRACE_S = 1.0

_TICK_S = 0.25


class Transfer(Protocol):
    """A body or an answer on its way."""

    @property
    def holder(self) -> str | None:
        """The client whose memory the transfer holds; None: it holds none."""
        ...

    def moved_bytes(self) -> int | None:
        """Return the bytes since the last call; None: the transfer waits for this server."""
        ...

    def slowed(self) -> None:
        """Note that the transfer is slower than `HURRIED_RATE`."""
        ...

    def end_slow(self) -> None:
        """End the transfer, which is too slow."""
        ...


@dataclass(slots=True)
class _Grace:
    """For how many seconds a transfer may stand still, by each of the rates."""

    seconds: float = GRACE_S
    hurried_s: float = HURRIED_GRACE_S


class Pace:
    """The transfers of one process that take longer than a moment.

    Args:
        memory: the memory that the transfers hold.
    """

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
