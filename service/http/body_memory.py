"""Bounds the memory of request bodies, so that many large ones at once cannot exhaust it.

A request needs memory in proportion to its body: for the parsed texts, their tokens and their
encodings. docs/reliability.md has what was measured.
"""

import asyncio
from collections import deque

from cloze.service.core import Overloaded

_SMALL_BYTES = 65_536
"""Bodies up to this size are not counted; the queue and the connections bound their number."""


class BodyMemory:
    """The bytes of the large bodies that a process may hold at once.

    Args:
        most: of all bodies; a body that is larger is held alone.
        max_wait_s: longest time until a request may read its body; 0: no limit.
    """

    def __init__(self, most: int, max_wait_s: float) -> None:
        self._most, self._max_wait_s = most, max_wait_s
        self._held = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def hold(self, size: int) -> int:
        """Wait until a body fits, and hold its memory until `release`.

        The connection is not read meanwhile, so the body waits in the client.

        Args:
            size: the most bytes of the body.

        Returns:
            The held bytes.

        Raises:
            Overloaded: the body did not fit in time.
        """
        if size <= _SMALL_BYTES:
            return 0
        size = min(size, self._most)
        if self._waiting or self._held + size > self._most:
            await self._wait(size)
        else:
            self._held += size
        return size

    def release(self, size: int) -> None:
        """Release what `hold` returned."""
        self._held -= size
        self._wake()

    async def _wait(self, size: int) -> None:
        """Wait in line until ``size`` bytes are held for this request."""
        fits = asyncio.get_running_loop().create_future()
        self._waiting.append((fits, size))
        try:
            await asyncio.wait_for(asyncio.shield(fits), self._max_wait_s or None)
        except (TimeoutError, asyncio.CancelledError) as error:
            if fits.done():
                self.release(size)
            else:
                self._waiting.remove((fits, size))
                self._wake()
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"the bodies of other requests hold {self._held} bytes; with this one's {size} "
                    f"they would pass the limit of {self._most}",
                    1,
                ) from None
            raise

    def _wake(self) -> None:
        """Hold memory for the requests that wait, in the order of their arrival."""
        while self._waiting and self._held + self._waiting[0][1] <= self._most:
            fits, size = self._waiting.popleft()
            self._held += size
            fits.set_result(None)
