"""What is measured for admission and batches: busy workers, the rate of draining, and due work."""

import math
import threading

_MIN_WINDOW_S = 0.25
"""Shortest time over which a rate is measured; a batch takes about 20 ms."""

_MAX_WINDOW_S = 10.0
"""Longest time between two batches of a busy queue; a batch of one long text takes seconds."""

_WEIGHT = 0.3
"""Weight of the newest window in the exponential moving average."""

_STEP_S = 0.1
"""Dues are rounded down to such steps."""


class Activity:
    """Counts the busy workers of all schedulers of a process. Any thread may call its methods.

    A lone batch can use all cores; others share them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = 0

    @property
    def busy(self) -> int:
        """Number of busy workers."""
        return self._busy

    def begin(self) -> None:
        """Count a worker that begins to look for work."""
        with self._lock:
            self._busy += 1

    def end(self) -> None:
        """Count off a worker that begins to wait, or ends."""
        with self._lock:
            self._busy -= 1


class DrainRate:
    """The rate at which a queue drains, of all workers together, while others wait.

    What is counted are the tokens of batches, or anything else that is worked off. The duration of
    batches alone would overestimate the rate: between batches, workers wait for each other, for the
    interpreter and for cores. All models of a process share the cores, so the rate falls at once
    when another model begins to work, before a window has measured it.

    The class is not safe for threads: the lock of the scheduler guards every call.

    Attributes:
        per_s: the measured rate; 0.0 until the queue was busy for long enough.
    """

    def __init__(self) -> None:
        self.per_s = 0.0
        self._busy = 0.0  # busy workers of the process at the measured rate
        self._since: float | None = None
        self._tokens = 0
        self._busy_tokens = 0  # each token times the workers that were busy

    def among(self, busy: int) -> float:
        """Return the rate while so many workers of the process are busy.

        With more than were measured, each gets less; with fewer, the rate stays until it is
        measured, because these workers may have had cores of their own.
        """
        return self.per_s * min(1.0, self._busy / busy) if busy else self.per_s

    def batch_ended(self, now: float, tokens: int, *, waiting: bool, busy: int = 1) -> None:
        """Count a batch.

        Args:
            now: `time.monotonic` time at which the batch ended.
            tokens: number of its tokens.
            waiting: whether further encodings wait now.
            busy: number of busy workers of the process.
        """
        if self._since is not None:
            self._tokens += tokens
            self._busy_tokens += tokens * busy
            seconds = now - self._since
            if seconds > _MAX_WINDOW_S:  # what waited was cancelled, or the process was stopped
                self._since = None
            elif seconds >= _MIN_WINDOW_S:
                self._add(self._tokens / seconds, self._busy_tokens / self._tokens)
                self._begin(now)
        if not waiting:
            self._since = None
        elif self._since is None:
            self._begin(now)

    def _begin(self, now: float) -> None:
        """Begin a window."""
        self._since, self._tokens, self._busy_tokens = now, 0, 0

    def _add(self, per_s: float, busy: float) -> None:
        weight = _WEIGHT if self.per_s else 1.0
        self.per_s += weight * (per_s - self.per_s)
        self._busy += weight * (busy - self._busy)


class Demand:
    """The waiting tokens, by the time at which they are due.

    All of them can end in time if, for each time, the tokens that are due until then run until
    then: the earliest deadline first is an order that does it (Liu and Layland 1973).

    The class is not safe for threads: the lock of the scheduler guards every call.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}  # step of the due time -> tokens
        self._total = 0
        self._first: float = math.inf  # the first step, or an earlier one

    def add(self, due: float, tokens: int) -> None:
        """Add tokens that are due at a `time.monotonic` time; negative: subtract them."""
        if due == math.inf:
            return
        step = math.floor(due / _STEP_S)
        self._total += tokens
        left = self._tokens.get(step, 0) + tokens
        if left:
            self._tokens[step] = left
            self._first = min(self._first, step)
        else:
            self._tokens.pop(step, None)
            if step == self._first:
                self._first = min(self._tokens, default=math.inf)

    def slack_s(self, now: float, rate: float, due: float = math.inf, tokens: int = 0) -> float:
        """Return how long the queue may do other work, and all that waits still ends in time.

        Args:
            now: `time.monotonic` time.
            rate: tokens per second.
            due: when further tokens would be due; dues before it do not depend on them.
            tokens: number of these tokens.

        Returns:
            Seconds, or a lower bound above zero; below zero: something ends too late.
        """
        if due == math.inf:
            tokens = 0
        added = math.floor(due / _STEP_S) if tokens else math.inf
        bound = min(self._first, added) * _STEP_S - now - (self._total + tokens) / rate
        if bound > 0:
            return bound
        sums, slack = tokens, math.inf
        before = 0
        for step in sorted(self._tokens):
            if step < added:
                before += self._tokens[step]
                if not tokens:
                    slack = min(slack, step * _STEP_S - now - before / rate)
                continue
            sums += self._tokens[step]
            slack = min(slack, step * _STEP_S - now - (before + sums) / rate)
        return min(slack, added * _STEP_S - now - (before + tokens) / rate)
