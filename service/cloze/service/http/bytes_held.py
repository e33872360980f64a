"""Bounds what the bodies, or the answers, of a process hold at once."""

import asyncio
from collections import Counter
from dataclasses import dataclass

from cloze.service.errors import Overloaded, Rejection

SMALL_BYTES = 65_536
"""Bodies and answers up to this size are not counted; the number of connections bounds them."""


@dataclass(slots=True, eq=False)
class Hold:
    """What one body or one answer of a client holds of a `ByteBudget`, and how long it waited."""

    client: str
    size: int = 0
    waited_s: float = 0.0


class ByteBudget:
    """The bytes, or other units, of one purpose. First come, first served; one client gets half.

    The first hold of a client may pass its half, and the first hold of all may pass the limit. So
    half-sent bodies cannot wait for each other for ever, and one body at most is above the limit.

    For example, of 32 MB one client has 16 MB for its two bodies of 8 MB. Its third one waits until
    one of these is answered, while a body of another client goes on.

    Args:
        what: what holds the bytes, in the plural, for errors.
        longest_wait_s: longest wait of a hold for room, in all; 0: as long as the request may take.
    """

    def __init__(self, what: str, most: int, longest_wait_s: float = 0.0) -> None:
        self._what, self._most, self._longest_wait_s = what, most, longest_wait_s
        self._share = most - most // 2
        self._holds: dict[Hold, None] = {}  # in the order in which they came
        self._held = 0
        self._by_client: Counter[str] = Counter()  # bytes
        self._waiting: dict[Hold, tuple[int, asyncio.Future[None]]] = {}  # for so many more

    async def grow(self, hold: Hold, size: int, left_s: float) -> None:
        """Wait until a hold may have ``size`` bytes in all; `release` must follow in any case.

        `left_s` is the time that is left to the request.

        Raises:
            Overloaded: there was no room in time.
        """
        if size <= hold.size:
            return
        loop, more = asyncio.get_running_loop(), size - hold.size
        granted, began = loop.create_future(), loop.time()
        self._holds.setdefault(hold)
        self._waiting[hold] = more, granted
        self._wake()
        if granted.done():
            return
        if self._longest_wait_s:  # of a body in all, which may wait for each of its parts
            left_s = min(self._longest_wait_s - hold.waited_s, left_s)
        try:
            async with asyncio.timeout(left_s):
                await granted
        except TimeoutError:
            raise self._refusal(hold.client, more) from None
        finally:
            self._waiting.pop(hold, None)
            hold.waited_s += loop.time() - began

    def shrink(self, hold: Hold, size: int) -> None:
        """Release what a hold has above ``size`` bytes."""
        if hold.size > size:
            self._add(hold, size - hold.size)
            self._wake()

    def release(self, hold: Hold) -> None:
        """Forget a hold."""
        if hold in self._holds:
            del self._holds[hold]
            self._add(hold, -hold.size)
            self._wake()

    def _add(self, hold: Hold, more: int) -> None:
        hold.size += more
        self._held += more
        self._by_client[hold.client] += more
        if not self._by_client[hold.client]:
            del self._by_client[hold.client]

    def _wake(self) -> None:
        """Let the holds that wait grow, the first one first, as far as there is room."""
        clients: set[str] = set()
        for hold in [*self._holds] if self._waiting else ():
            is_first, is_first_of_client = not clients, hold.client not in clients
            clients.add(hold.client)
            if hold not in self._waiting:
                continue
            more, granted = self._waiting[hold]
            if self._by_client[hold.client] + more > self._share and not is_first_of_client:
                continue
            if self._held + more > self._most and not is_first:
                return  # later ones must not take the room for which it waits
            del self._waiting[hold]
            self._add(hold, more)
            if not granted.done():
                granted.set_result(None)

    def _refusal(self, client: str, more: int) -> Overloaded:
        own = self._by_client[client]
        whose, held, limit = "all clients", self._held, f"the limit of {self._most}"
        if own + more > self._share:
            whose, held, limit = "this client", own, f"its share of {self._share}"
        holding = f"the {self._what} of {whose} hold {held} bytes"
        message = f"{holding}; with {more} more they would pass {limit}"
        return Overloaded(message, 1, Rejection.MEMORY)
