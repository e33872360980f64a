"""Decides whether a request may wait: by its expected end, and by the memory of the queue.

A request waits behind what waits in its line, while each other line gets as much. Later requests of
its line do not delay it; later lines may, so a part of its time is left for them, and a request is
admitted only if all that was admitted before can still end in time (`Demand`).
docs/architecture.md explains the rules, docs/decisions/0017-admission-by-time.md the reasons.
"""

import math
import threading
from collections import Counter
from dataclasses import dataclass

from cloze.service.batching.fair_queue import (
    BULK_SHARE,
    ExpectedWait,
    FairQueue,
    LineKey,
    Submission,
)
from cloze.service.errors import Overloaded, Rejection

_MIN_WINDOW_S = 0.25
"""Shortest time over which a rate is measured; a batch takes about 20 ms."""

_MIN_BATCHES = 8
"""Fewest batches over which the rate of several workers is measured.

The time begins and ends with the end of a batch, and the batches of other workers have begun before
it. Measured over two batches of a second each, two workers seem half as fast again as they are.
"""

_MAX_WINDOW_S = 10.0
"""Longest time between two batches of a busy queue; a batch of one long text takes seconds."""

_SHARE_OF_TIME = 0.5
"""Share of its time in which a request must be expected to end.

The rest is for clients, lines and models that come later, and for errors of the measured rate.
"""

_LONGEST_WAIT_S = 2.5
"""Longest wait of a request that states no time limit, if no setting says another.

httpx gives up after 5 s, and a wait of 2.5 s may take 4 s while an overload begins.
"""

_SHARE_OF_NEW = 0.5
"""Least share of the limits for new requests while refused ones are due to come back.

The rest is for those, which may come in bursts, since `Retry-After` has whole seconds. With three
quarters, 84 % of 1,000 connections that wait are admitted when they come back, with half 100 %.
"""

_FREE_REQUESTS = 64
"""Requests of a client that may wait beyond the longest wait, if no setting says another wait.

Load generators and pools of threads use up to 64 connections, and ignore refusals.
"""


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """How long requests may wait for their first batch.

    Attributes:
        longest_s: longest wait of a request that states no time limit; 0: no limit.
        timeout_s: the request timeout, of a request that states no time limit.
        free_requests: requests of a client, over all models of the process, that may wait for
            longer, if they are expected to end within half of the request timeout. One or two
            clients have all of its 15 s, each of three has 6.7 s, and each of four 3.75 s.
    """

    longest_s: float = 0.0
    timeout_s: float = math.inf
    free_requests: int = 0

    @classmethod
    def of(cls, max_queue_wait_ms: int | None, request_timeout_ms: int) -> "WaitLimits":
        """Return the limits of settings; a longest wait that an operator has set is exact."""
        timeout_s = request_timeout_ms / 1000
        if max_queue_wait_ms is None:
            return cls(_LONGEST_WAIT_S, timeout_s, _FREE_REQUESTS)
        return cls(max_queue_wait_ms / 1000, timeout_s)

    def excess_s(
        self,
        wait: ExpectedWait,
        stated_s: float | None,
        *,
        is_bulk: bool = False,
        before: int = 0,
    ) -> float:
        """Return in how many seconds a request may wait; 0.0 or less: it may wait now.

        Args:
            wait: the expected wait of the request.
            stated_s: the time limit that the request states, if any.
            is_bulk: whether others may take the rate at which the request is expected to run.
            before: number of refused requests like it that are due to come back before it.
        """
        before_s, end_s = before * wait.per_request_s, wait.end_s
        if stated_s is not None:
            most_s = _SHARE_OF_TIME * stated_s
            return end_s + _reserved(before_s, most_s) - most_s if wait.seconds else 0.0
        if not self.longest_s:
            return 0.0
        too_long_s = wait.seconds + _reserved(before_s, self.longest_s) - self.longest_s
        if is_bulk or not self.free_requests:
            return too_long_s
        too_many = wait.requests + 1 + _reserved(before, self.free_requests) - self.free_requests
        most_s = self._longest_free_s(wait.clients)
        too_late_s = end_s + _reserved(before_s, most_s) - most_s
        return min(too_long_s, max(too_many * wait.per_request_s, too_late_s))

    def describe_excess(self, wait: ExpectedWait, stated_s: float | None) -> str:
        """Return the message for a request that may not wait."""
        if stated_s is not None:
            end_s = math.ceil(wait.end_s * 10) / 10
            return (
                f"the request would end in about {end_s:g} s; {_SHARE_OF_TIME * stated_s:g} s are "
                "allowed, half of the time limit that it states"
            )
        about = f"the request would wait about {math.ceil(wait.seconds * 10) / 10:g} s; "
        about += f"CLOZE_MAX_QUEUE_WAIT_MS allows {self.longest_s:g} s"
        if self.free_requests and (free_s := self._longest_free_s(wait.clients)) > self.longest_s:
            about += (
                f", and more for the first {self.free_requests} requests of a client if they end "
                f"within {free_s:.3g} s"
            )
        return about

    def _longest_free_s(self, clients: int) -> float:
        """Return within how many seconds the free requests of each of so many clients must end."""
        return _SHARE_OF_TIME * self.timeout_s * min(1.0, (2 / clients) ** 2)


def _reserved(before: float, limit: float) -> float:
    """Return what new requests leave of a limit to those that are due to come back."""
    return min(before, (1 - _SHARE_OF_NEW) * limit)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of a scheduler.

    Attributes:
        max_batch_tokens: most tokens per batch; a longer single encoding runs alone.
        max_queue_tokens: most tokens that may wait. An empty queue admits a request of any size.
        waits: how long requests may wait.
        stall_timeout_s: seconds that a run may take beyond ten times its predicted time. After
            that, the engine hangs.
        batch_latency_s: longest duration of a batch of several encodings; 0: no such limit.
        canary_s: seconds without a batch after which a golden batch runs; 0: never.
    """

    workers: int
    max_batch_tokens: int
    max_queue_tokens: int
    stall_timeout_s: float
    batch_latency_s: float = 0.0
    waits: WaitLimits = WaitLimits()
    canary_s: float = 0.0


class Activity:
    """What all schedulers of a process do together, and the one lock that guards all of them.

    A lone batch can use all cores; others share them.

    Attributes:
        busy: number of workers that look for work or run a batch.
        asked: the time at which a request that is not bulk was last queued.
        requests: number of requests that have not ended and are not bulk, by client.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # to enter it costs less than a condition
        self.busy = 0
        self.asked = -math.inf
        self.requests: Counter[str] = Counter()


class DrainRate:
    """The rate at which a queue drains, of all workers together, while others wait.

    The duration of batches alone would overestimate the rate: between batches, workers wait for
    each other, for the interpreter and for cores.

    `least` is the fewest counts over which the rate is measured.

    Attributes:
        per_s: tokens, or whatever is counted, per second; 0.0 until the queue was busy for long
            enough.
        busy: mean number of busy workers of the process at that rate.
    """

    def __init__(self, least: int = 1) -> None:
        self._least = least
        self.per_s = self.busy = 0.0
        self._since: float | None = None
        self._amount = self._counts = 0
        self._busy_amount = 0  # each token times the workers that were busy

    def count(self, now: float, amount: int, *, waiting: bool, busy: int = 1) -> None:
        """Count what ends now, with so many busy workers, and note whether others wait."""
        if self._since is not None:
            self._amount += amount
            self._counts += 1
            self._busy_amount += amount * busy
            seconds = now - self._since
            is_long = seconds >= _MIN_WINDOW_S and self._counts >= self._least
            if is_long and seconds <= _MAX_WINDOW_S:
                weight = 0.3 if self.per_s else 1.0  # a moving average
                self.per_s += weight * (self._amount / seconds - self.per_s)
                self.busy += weight * (self._busy_amount / max(1, self._amount) - self.busy)
            if is_long or seconds > _MAX_WINDOW_S:  # others were cancelled, or nothing ran
                self._since = None
        if not waiting:
            self._since = None
        elif self._since is None:
            self._since, self._amount, self._busy_amount, self._counts = now, 0, 0, 0


class Admission:
    """The admission of one scheduler, whose lock guards it.

    Attributes:
        tokens_per_s: mean rate of one worker while its batches run; 0.0 before the first batch.
    """

    def __init__(self, queue: FairQueue, activity: Activity, limits: SchedulerLimits) -> None:
        self._queue, self._activity, self._limits = queue, activity, limits
        self._drain_rate = DrainRate(_MIN_BATCHES if limits.workers > 1 else 1)
        self._bulk_rate = DrainRate()  # what others leave
        self.tokens_per_s = self._lone_per_s = 0.0
        self._batches = self._lone_batches = 0

    def batch_ended(
        self, now: float, tokens: int, seconds: float, *, is_bulk: bool, alone: bool = False
    ) -> None:
        """Measure the rates with a batch that ends now.

        A batch that ran alone may have had the cores of all workers. So it counts as it is only
        until another one was measured, and then by its difference from earlier ones of its kind.
        """
        per_s, before = tokens / max(seconds, 1e-9), self._lone_per_s
        # Both are means of the first ten, then moving averages.
        if not alone:
            self._batches += 1
            self.tokens_per_s += max(0.1, 1 / self._batches) * (per_s - self.tokens_per_s)
        else:
            self._lone_batches += 1
            self._lone_per_s += max(0.1, 1 / self._lone_batches) * (per_s - before)
            is_first = not (self._batches and before)
            self.tokens_per_s *= 1.0 if is_first else self._lone_per_s / before
        if not self._batches:
            self.tokens_per_s = self._lone_per_s
        queue = self._queue
        self._drain_rate.count(now, tokens, waiting=queue.tokens > 0, busy=self._activity.busy)
        self._bulk_rate.count(now, tokens * is_bulk, waiting=queue.bulk_tokens > 0)

    @property
    def rate(self) -> float:
        """The tokens per second of all workers; 0.0 before the first batch.

        All models of a process share the cores. If more workers are busy than were at the measured
        rate, because another model begins to work, each gets less at once. If fewer are, the rate
        stays until it is measured, because these workers may have had cores of their own.
        """
        batches = self.tokens_per_s * self._limits.workers  # while batches run
        measured, busy = self._drain_rate, self._activity.busy
        if not measured.per_s:
            return batches
        drained = measured.per_s * min(1.0, measured.busy / max(1, busy))
        return max(drained, 0.2 * batches)  # else a wrong figure would stay

    def _rate_of(self, *, is_bulk: bool) -> float:
        """Return the rate at which the bulk requests drain, or all others together."""
        rate, queue = self.rate, self._queue
        if is_bulk:
            measured = self._bulk_rate.per_s or (rate if queue.tokens == queue.bulk_tokens else 0.0)
            return max(measured, BULK_SHARE * rate)
        return rate * (1 - BULK_SHARE) if queue.bulk_tokens else rate

    def expected_wait(
        self, client: str, line: LineKey, tokens: int, unsubmitted: int = 0
    ) -> ExpectedWait:
        """Return the wait of a request that arrives now; see `fair_queue.Queue`."""
        rate, queue = self._rate_of(is_bulk=line.is_bulk), self._queue
        requests = self._activity.requests[client]
        ahead, lines, clients = queue.share(client, line)
        if not rate:
            return ExpectedWait(0.0, 0.0, requests, ahead)
        every = tuple(self._activity.requests.values())  # a copy, as in `share`
        most = max(every, default=0)
        sharing = max(1, sum([4 * each >= most for each in every]))
        # Other lines of the client go on, so all of them count; other clients only as they wait.
        own = (ahead + unsubmitted) * lines
        alike = queue.bulk_tokens if line.is_bulk else queue.tokens - queue.bulk_tokens
        waiting = alike + unsubmitted
        wait = min(own * clients, max(own, waiting))
        lasts = min(tokens * lines * clients, waiting + tokens)
        each = min(lasts, tokens * (waiting + tokens) / (ahead + unsubmitted + tokens))
        return ExpectedWait(wait / rate, each / rate, requests, ahead, sharing, lasts / rate)

    def check(self, request: Submission, now: float) -> None:
        """Raise if a request has to wait for too long, behind what waits in the queue.

        Raises:
            Overloaded: the request would wait for too long, it or another one would end after its
                deadline, or the queue would need too much memory.
        """
        terms, tokens, queue = request.terms, request.tokens, self._queue
        wait = self.expected_wait(terms.client, request.key, tokens)
        rate = self._rate_of(is_bulk=terms.is_bulk)
        most, waiting, ahead = self._limits.max_queue_tokens, queue.tokens, wait.ahead
        free = most - waiting
        if ahead + tokens > free:  # so no line ever fills the queue (Choudhury and Hahne 1998)
            raise Overloaded(
                f"the queue holds {waiting} tokens, {ahead} of them like this request's {tokens}; "
                f"together they would be more than the {free} that are left of the limit of {most}",
                (ahead + tokens - free) / rate if rate else 1.0,
                Rejection.QUEUE_FULL,
                tokens / rate if rate else 0.0,
            )
        if not rate:
            return
        waits, each_s = self._limits.waits, wait.per_request_s
        if (excess_s := waits.excess_s(wait, terms.timeout_s, is_bulk=terms.is_bulk)) > 0:
            message = waits.describe_excess(wait, terms.timeout_s)
            raise Overloaded(message, excess_s, Rejection.WAIT, each_s)
        end_s, left_s = wait.end_s, terms.deadline - now
        slack_s = queue.demand.slack_s(now, self._rate_of(is_bulk=False), request.due, tokens)
        late_s = max(end_s - _SHARE_OF_TIME * left_s, -slack_s)
        if late_s > 0:
            raise Overloaded(
                f"the request would end in about {end_s:.1f} s beside what was accepted before it, "
                f"which is too close to its time limit in {left_s:.1f} s",
                late_s,
                Rejection.DEADLINE,
                each_s,
            )
