"""When refused requests may come back: the ``Retry-After`` of a refusal is a reservation.

A line admits requests at the rate at which it drains. So each refused request of a line gets a time
of its own, one after another. A client that comes back at that time goes before new requests: these
are admitted only while the line is half empty as long as times are promised. So promises that
nobody redeems never leave the workers idle.
"""

from collections import deque
from typing import NamedTuple

_MOST = 8192
"""Most promises of a process. A line may hold as many as are left free (Choudhury 1998)."""

_LONGEST_S = 60.0
"""Longest time of a promise; the openai client waits for no longer."""

_EARLY_S = 0.05
"""How much earlier than told a client may come; timers and clocks are not exact."""

_LATE_S = 3.0
"""How much later than told a client may come: a whole second of rounding, and its own delay."""


class PromiseKey(NamedTuple):
    """The requests of a client and a class of patience, before the engine of a model.

    The size does not count: the gate only estimates it.
    """

    model: str
    client: str
    patience: int


class Promises:
    """The times at which refused requests may come back.

    The class is not safe for threads: the event loop of the process makes every call.
    """

    def __init__(self) -> None:
        self._times: dict[PromiseKey, deque[float]] = {}  # by line, the earliest time first
        self._count = 0
        self._swept = 0.0

    def __len__(self) -> int:
        return self._count

    def promise(self, line: PromiseKey, now: float, wait_s: float, each_s: float) -> float:
        """Return the seconds after which a refused request may come back, and remember the time.

        Args:
            line: the line that refused the request.
            now: `time.monotonic` time.
            wait_s: seconds until the line would admit the request if nothing was promised.
            each_s: seconds in which the line works off one such request.
        """
        times = self._outstanding(line, now)
        time = now + wait_s
        if times:
            time = max(time, times[-1] + each_s)
        if time > now + _LONGEST_S:
            return _LONGEST_S
        if self._count >= _MOST // 2 and now > self._swept + 1:
            self._sweep(now)
        if len(times) < _MOST - self._count:
            self._times[line] = times
            times.append(time)
            self._count += 1
        return time - now

    def redeem(self, line: PromiseKey, now: float) -> bool:
        """Return whether a request of a line comes back as told, and take its time away."""
        times = self._outstanding(line, now)
        if not times or times[0] - _EARLY_S > now:
            return False
        times.popleft()
        self._count -= 1
        return True

    def outstanding(self, line: PromiseKey, now: float) -> bool:
        """Return whether requests of a line may still come back."""
        return bool(self._outstanding(line, now))

    def _outstanding(self, line: PromiseKey, now: float) -> deque[float]:
        """Return the times of a line that have not passed."""
        times = self._times.get(line)
        if times is None:
            return deque()
        while times and times[0] + _LATE_S < now:
            times.popleft()
            self._count -= 1
        if not times:
            del self._times[line]
        return times

    def _sweep(self, now: float) -> None:
        self._swept = now
        for line in list(self._times):
            self._outstanding(line, now)
