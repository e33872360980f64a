"""An event loop whose clock leaps to the next timer, so that tests of time limits take no time."""

import asyncio
import heapq
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop on which nothing happens between two timers; threads and sockets are ignored."""

    _ready: Any
    _scheduled: Any
    _timer_cancelled_count: int

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__()

    def time(self) -> float:
        """Return the time of the last timer."""
        return self._now

    def _run_once(self) -> None:
        while self._scheduled and self._scheduled[0].cancelled():  # else asyncio waits for the next
            heapq.heappop(self._scheduled)._scheduled = False
            self._timer_cancelled_count -= 1
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]


def run_leaping(main: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine; see `asyncio.run`."""
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        return runner.run(main)


LEAPING = ("asyncio", {"loop_factory": LeapingLoop})
"""The value of the fixture ``anyio_backend`` for tests that run on a leaping loop."""
