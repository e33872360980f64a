"""Bounds the memory of what requests send and get, so that many large ones cannot exhaust it.

A request needs memory in proportion to its body: for the parsed texts, their tokens and their
encodings. Its answer needs memory until the client has read it. docs/reliability.md has what was
measured.
"""

import asyncio
from collections import deque

from cloze.service.core import Overloaded, Rejection

SMALL_BYTES = 65_536
"""Bodies and answers up to this size are not counted; the number of connections bounds them."""


class MemoryLimit:
    """The bytes that a process may hold at once for one purpose.

    Args:
        what: what holds the bytes, in the plural, for errors.
        most: bytes in all; what needs more is held alone.
        max_wait_s: longest wait for room; 0: no limit.
    """

    def __init__(self, what: str, most: int, max_wait_s: float = 0.0) -> None:
        self._what, self._most, self._max_wait_s = what, most, max_wait_s
        self._held = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def is_full(self) -> bool:
        """Whether somebody waits for room, or more is held than allowed."""
        return bool(self._waiting) or self._held > self._most

    async def hold(self, size: int) -> int:
        """Wait until there is room, and hold bytes until `release`.

        Args:
            size: the bytes.

        Returns:
            The held bytes, 0 for a small size.

        Raises:
            Overloaded: there was no room in time.
        """
        if size <= SMALL_BYTES:
            return 0
        size = min(size, self._most)
        if self._waiting or self._held + size > self._most:
            await self._wait(size)
        else:
            self._held += size
        return size

    def hold_now(self, size: int) -> int:
        """Hold bytes even if there is no room; return the held bytes, 0 for a small size."""
        if size <= SMALL_BYTES:
            return 0
        self._held += size
        return size

    def release(self, size: int) -> None:
        """Release what `hold` or `hold_now` returned."""
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
                    f"the {self._what} of other requests hold {self._held} bytes; with this one's "
                    f"{size} they would pass the limit of {self._most}",
                    1,
                    Rejection.MEMORY,
                ) from None
            raise

    def _wake(self) -> None:
        """Hold memory for the requests that wait, in the order of their arrival."""
        while self._waiting and self._held + self._waiting[0][1] <= self._most:
            fits, size = self._waiting.popleft()
            self._held += size
            fits.set_result(None)
