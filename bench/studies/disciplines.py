"""Disciplines of queues from literature, for a comparison with admission at the arrival.

- CoDel: K. Nichols, V. Jacobson 2012, "Controlling Queue Delay"; RFC 8289, section 5.
- Controlled delay and adaptive LIFO of request queues: B. Maurer 2015, "Fail at Scale", ACM Queue.
  The form of controlled delay is that of folly's `Codel` class.
"""

import math


class FirstInFirstOut:
    """Takes the oldest request, and drops none."""

    def newest_first(self, now: float) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def drops(self, now: float, wait_s: float) -> bool:  # noqa: ARG002
        """Return False."""
        return False

    def emptied(self, now: float) -> None:
        """Ignore that no request waits."""


class CoDel(FirstInFirstOut):
    """Drops from the head at a rate that rises while all waits exceed the target (RFC 8289).

    Args:
        target_s: wait that may persist.
        interval_s: time for which waits exceed the target before the first drop.
    """

    def __init__(self, target_s: float, interval_s: float) -> None:
        self._target_s, self._interval_s = target_s, interval_s
        self._above_since: float | None = None
        self._dropping = False
        self._next_drop = 0.0
        self._count = self._last_count = 0

    def emptied(self, now: float) -> None:  # noqa: ARG002
        """Leave the state of dropping: the next wait is short."""
        self._above_since = None

    def drops(self, now: float, wait_s: float) -> bool:
        """Return whether a request is dropped; section 5.6 of the RFC, for one packet."""
        if not self._is_above_for_long(now, wait_s):
            self._dropping = False
            return False
        if not self._dropping:
            self._dropping = True
            delta = self._count - self._last_count
            recent = now - self._next_drop < 16 * self._interval_s
            self._count = self._last_count = delta if delta > 1 and recent else 1
            self._next_drop = now + self._interval_s / math.sqrt(self._count)
            return True
        if now < self._next_drop:
            return False
        self._count += 1
        self._next_drop += self._interval_s / math.sqrt(self._count)
        return True

    def _is_above_for_long(self, now: float, wait_s: float) -> bool:
        """Return whether all waits of the last interval exceeded the target."""
        if wait_s < self._target_s:
            self._above_since = None
            return False
        if self._above_since is None:
            self._above_since = now
        return now - self._above_since >= self._interval_s


class ControlledDelay(FirstInFirstOut):
    """Drops what waited twice the target, after an interval whose shortest wait exceeds the target.

    Args:
        target_s: wait that may persist.
        interval_s: time over which the shortest wait is taken.
    """

    def __init__(self, target_s: float, interval_s: float) -> None:
        self._target_s, self._interval_s = target_s, interval_s
        self._interval_end = 0.0
        self._shortest_s = 0.0
        self._overloaded = False

    def drops(self, now: float, wait_s: float) -> bool:
        """Return whether a request is dropped."""
        if now > self._interval_end:
            self._overloaded = self._shortest_s > self._target_s
            self._interval_end = now + self._interval_s
            self._shortest_s = wait_s
            return False
        self._shortest_s = min(self._shortest_s, wait_s)
        return self._overloaded and wait_s > 2 * self._target_s


class AdaptiveLifo(FirstInFirstOut):
    """Takes the newest request while the queue has not been empty for an interval.

    Args:
        interval_s: time for which a queue may persist.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._empty_at = 0.0

    def newest_first(self, now: float) -> bool:
        """Return whether the queue persists."""
        return now - self._empty_at > self._interval_s

    def emptied(self, now: float) -> None:
        """Note that no request waits."""
        self._empty_at = now
