"""The rate at which a queue drains: tokens per second of all workers together, while others wait.

The duration of batches alone would overestimate the rate: between batches, workers wait for each
other, for the interpreter and for cores. All models of a process share the cores, so the rate falls
at once when another model begins to work, before a window has measured it.
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
        self._busy = 0.0  # busy workers of the process at the measured rate
        self._since: float | None = None
        self._tokens = 0
        self._busy_tokens = 0  # each token times the workers that were busy

    def among(self, busy: int) -> float:
        """Return the rate while so many workers of the process are busy.

        With more than were measured, each gets less; with fewer, the rate stays until it is
        measured, because these workers may have had cores of their own.
        """
        return self.tokens_per_s * min(1.0, self._busy / busy) if busy else self.tokens_per_s

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

    def _add(self, tokens_per_s: float, busy: float) -> None:
        weight = _WEIGHT if self.tokens_per_s else 1.0
        self.tokens_per_s += weight * (tokens_per_s - self.tokens_per_s)
        self._busy += weight * (busy - self._busy)
