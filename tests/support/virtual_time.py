"""A clock that a test sets, so that tests of time limits take no time."""

import asyncio
import threading

from cloze.service.clock import Clock


class VirtualClock(Clock):
    """Virtual time in seconds, which advances when a test or a waiting thread says so."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def monotonic(self) -> float:  # type: ignore[override]
        return self.now

    def wall(self) -> float:  # type: ignore[override]
        return self.now

    def sleep(self, seconds: float) -> None:  # type: ignore[override]
        self.now += seconds

    def wait(self, event: threading.Event, seconds: float) -> bool:  # type: ignore[override]
        if not event.is_set():
            self.now += seconds
        return event.is_set()


class LoopClock(Clock):
    """The time of the running event loop; 0 without one."""

    def monotonic(self) -> float:  # type: ignore[override]
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return 0.0

    wall = monotonic  # type: ignore[assignment]


LOOP_CLOCK = LoopClock()
