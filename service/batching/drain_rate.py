"""The rate at which a queue drains: tokens per second of all workers together, while others wait.

The duration of batches alone would overestimate the rate: between batches, workers wait for each
other, for the interpreter and for cores.
"""

_MIN_WINDOW_S = 0.25
"""Shortest time over which a rate is measured; a batch takes about 20 ms."""

_MAX_WINDOW_S = 10.0
"""Longest time between two batches of a busy queue; a batch of one long text takes seconds."""

_WEIGHT = 0.3
"""Weight of the newest window in the exponential moving average."""


class DrainRate:
    """Measures tokens per second between the ends of batches while encodings wait.

    The class is not safe for threads: the lock of the scheduler guards every call.

    Attributes:
        tokens_per_s: the measured rate; 0.0 until the queue was busy for long enough.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self._since: float | None = None
        self._tokens = 0

    def batch_ended(self, now: float, tokens: int, *, waiting: bool) -> None:
        """Count a batch.

        Args:
            now: `time.monotonic` time at which the batch ended.
            tokens: number of its tokens.
            waiting: whether further encodings wait now.
        """
        if self._since is not None:
            self._tokens += tokens
            seconds = now - self._since
            if seconds > _MAX_WINDOW_S:  # what waited was cancelled, or the process was stopped
                self._since = None
            elif seconds >= _MIN_WINDOW_S:
                self._add(self._tokens / seconds)
                self._since, self._tokens = now, 0
        if not waiting:
            self._since = None
        elif self._since is None:
            self._since, self._tokens = now, 0

    def _add(self, tokens_per_s: float) -> None:
        weight = _WEIGHT if self.tokens_per_s else 1.0
        self.tokens_per_s += weight * (tokens_per_s - self.tokens_per_s)
