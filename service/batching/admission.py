"""Decides whether a request may wait: by its expected wait, and by the memory of the queue.

The expected wait is the tokens before the request, divided by the measured rate.
docs/decisions/0017-admission-by-time.md has the alternatives.
"""

import math
import time
from collections.abc import Sequence

from cloze.service.batching.drain_rate import DrainRate
from cloze.service.batching.fair_queue import FairQueue
from cloze.service.core import Overloaded, Rejection

_WEIGHT = 0.1
"""Weight of the newest value in exponential moving averages."""

_LEAST_RATE_SHARE = 0.2
"""Least rate of draining, as a share of the rate of batches; corrects a figure that is wrong."""


class Admission:
    """The admission of one scheduler, whose lock guards it.

    Args:
        queue: the requests that wait.
        workers: number of threads that run batches.
        max_queue_tokens: most tokens that may wait.
        max_wait_s: longest expected wait of a request that states no limit; 0: no such limit.

    Attributes:
        tokens_per_s: mean rate of one worker while its batches run; 0.0 before the first batch.
    """

    def __init__(
        self, queue: FairQueue, workers: int, max_queue_tokens: int, max_wait_s: float
    ) -> None:
        self._queue = queue
        self._workers = workers
        self._max_queue_tokens, self._max_wait_s = max_queue_tokens, max_wait_s
        self._drain_rate = DrainRate()
        self._first_tokens = 0.0  # mean length of the first encoding of a request
        self.tokens_per_s = 0.0

    def admitted(self, first_tokens: int) -> None:
        """Note the length of the first encoding of a request that was admitted."""
        self._first_tokens += _WEIGHT * (first_tokens - self._first_tokens)

    def batch_ended(self, tokens: int, tokens_per_s: float) -> None:
        """Note a batch and its rate."""
        weight = _WEIGHT if self.tokens_per_s else 1.0
        self.tokens_per_s += weight * (tokens_per_s - self.tokens_per_s)
        self._drain_rate.batch_ended(time.monotonic(), tokens, waiting=self._queue.tokens > 0)

    def expected_wait_s(self, client: str, *, unsubmitted: int = 0) -> float:
        """Return the seconds until the first batch of a request; see `core.Queue`."""
        rate = self._rate
        ahead = self._queue.tokens_ahead(client, 0) + unsubmitted * self._first_tokens
        return ahead / rate if rate else 0.0

    @property
    def backlog_s(self) -> float:
        """The seconds in which all that waits will have started; 0.0 before the first batch."""
        rate = self._rate
        return self._queue.tokens / rate if rate else 0.0

    @property
    def _rate(self) -> float:
        """The tokens per second of all workers; 0.0 before the first batch."""
        batches = self.tokens_per_s * self._workers  # while batches run
        drained = self._drain_rate.tokens_per_s
        return max(drained, _LEAST_RATE_SHARE * batches) if drained else batches

    def check(
        self, lengths: Sequence[int], client: str, max_wait_s: float | None, deadline: float
    ) -> None:
        """Raise if a request has to wait for too long. An empty queue admits any request.

        Args:
            lengths: tokens of each encoding of the request.
            client: who sends the request.
            max_wait_s: longest expected wait that the request states; None: it states none.
            deadline: `time.monotonic` time of the request's end.

        Raises:
            Overloaded: the first batch would start too late, the request would end after its
                deadline because of the others, or the queue would need too much memory.
        """
        queue = self._queue
        if not queue.tokens:
            return
        tokens, rate = sum(lengths), self._rate
        if queue.tokens + tokens > self._max_queue_tokens:
            raise Overloaded(
                f"the queue holds {queue.tokens} tokens; with this request's {tokens} "
                f"it would pass its limit of {self._max_queue_tokens}",
                _whole_seconds(queue.tokens / rate if rate else 1),
                Rejection.QUEUE_FULL,
            )
        if not rate:
            return
        wait_s = queue.tokens_ahead(client, lengths[0]) / rate
        limit_s = self._max_wait_s if max_wait_s is None else max_wait_s
        if limit_s and wait_s > limit_s:
            raise Overloaded(
                f"the request would wait about {wait_s:.1f} s, longer than its limit of "
                f"{limit_s:g} s",
                _whole_seconds(wait_s),
            )
        left_s = deadline - time.monotonic()
        end_s = queue.tokens_until_end(client, tokens) / rate
        if tokens / rate < left_s < end_s:
            raise Overloaded(
                f"the request would end in about {end_s:.1f} s, and its time limit is in "
                f"{left_s:.1f} s",
                _whole_seconds(end_s - left_s),
                Rejection.DEADLINE,
            )


def _whole_seconds(seconds: float) -> int:
    """Return a value of ``Retry-After``: whole seconds, at least 1."""
    return max(1, math.ceil(seconds))
