"""Decides whether a request may wait: by its expected end, and by the memory of the queue.

A request waits behind what waits in its line, while each other line gets as much. Later requests of
its line do not delay it; later lines may, so a request is admitted only if it is expected to end in
half of its time, and if all that was accepted can still end in time (`Demand`). `Promises` has the
times at which refused requests may come back.
docs/decisions/0017-admission-by-time.md has the alternatives.
"""

import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from cloze.service.batching.fair_queue import BULK_SHARE, FairQueue, LineKey, due_time
from cloze.service.core import NO_WAIT, ExpectedWait, Overloaded, Rejection, Submission

_MIN_WINDOW_S = 0.25
"""Shortest time over which a rate is measured; a batch takes about 20 ms."""

_MAX_WINDOW_S = 10.0
"""Longest time between two batches of a busy queue; a batch of one long text takes seconds."""

_LEAST_RATE_SHARE = 0.2
"""Least rate of draining, as a share of the rate of batches; corrects a figure that is wrong."""

_SHARE_OF_TIME = 0.5
"""Share of its time in which a request must be expected to end.

The rest is for clients and lines that come later, and for errors of the measured rate.
"""

_RETURNING = 1.25
"""How much longer a request may wait that comes back when it was told to."""

_MOST_PROMISES = 8192
"""Most promises of a process. A line may hold as many as are left free (Choudhury 1998)."""

_LONGEST_PROMISE_S = 60.0
"""Longest time of a promise; the openai client waits for no longer."""

_EARLY_S = 0.05
"""How much earlier than told a client may come; timers and clocks are not exact."""

_LATE_S = 3.0
"""How much later than told a client may come: a whole second of rounding, and its own delay."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of a scheduler.

    Attributes:
        max_batch_tokens: most tokens per batch; a longer single encoding runs alone.
        max_queue_tokens: most tokens that may wait. An empty queue admits a request of any size.
        max_wait_s: longest expected wait of a request that states no limit; 0: no such limit.
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
    max_wait_s: float = 0.0
    canary_s: float = 0.0


class Activity:
    """Counts the busy workers of all schedulers of a process. Any thread may call `add`.

    A lone batch can use all cores; others share them.

    Attributes:
        busy: number of workers that look for work or run a batch.
        asked: `time.monotonic` time at which a request that is not bulk was last queued.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.busy = 0
        self.asked = -math.inf

    def add(self, workers: int) -> None:
        """Count workers that become busy; negative: those that begin to wait, or end."""
        with self._lock:
            self.busy += workers


class DrainRate:
    """The rate at which a queue drains, of all workers together, while others wait.

    What is counted are the tokens of batches, or anything else that is worked off. The duration of
    batches alone would overestimate the rate: between batches, workers wait for each other, for the
    interpreter and for cores. All models of a process share the cores, so the rate falls at once
    when another model begins to work, before a window has measured it.

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
        """Count a batch that ends now, while others wait, and with so many busy workers."""
        if self._since is not None:
            self._tokens += tokens
            self._busy_tokens += tokens * busy
            seconds = now - self._since
            if _MIN_WINDOW_S <= seconds <= _MAX_WINDOW_S:
                weight = 0.3 if self.per_s else 1.0  # a moving average
                self.per_s += weight * (self._tokens / seconds - self.per_s)
                self._busy += weight * (self._busy_tokens / max(1, self._tokens) - self._busy)
            if seconds >= _MIN_WINDOW_S:  # too long: others were cancelled, or nothing ran
                self._since = None
        if not waiting:
            self._since = None
        elif self._since is None:
            self._since, self._tokens, self._busy_tokens = now, 0, 0


class Admission:
    """The admission of one scheduler, whose lock guards it.

    Attributes:
        tokens_per_s: mean rate of one worker while its batches run; 0.0 before the first batch.
    """

    def __init__(self, queue: FairQueue, activity: Activity, limits: SchedulerLimits) -> None:
        self._queue, self._activity, self._limits = queue, activity, limits
        self._drain_rate = DrainRate()
        self._bulk_rate = DrainRate()  # what others leave
        self.tokens_per_s = 0.0

    def batch_ended(self, tokens: int, tokens_per_s: float, *, is_bulk: bool = False) -> None:
        """Note a batch and its rate."""
        weight = 0.1 if self.tokens_per_s else 1.0  # a moving average
        self.tokens_per_s += weight * (tokens_per_s - self.tokens_per_s)
        busy, waiting, now = self._activity.busy, self._queue.tokens > 0, time.monotonic()
        self._drain_rate.batch_ended(now, tokens, busy=busy, waiting=waiting)
        bulk_waits = self._queue.bulk_tokens > 0
        self._bulk_rate.batch_ended(now, tokens * is_bulk, waiting=bulk_waits)

    @property
    def rate(self) -> float:
        """The tokens per second of all workers; 0.0 before the first batch."""
        batches = self.tokens_per_s * self._limits.workers  # while batches run
        drained = self._drain_rate.among(self._activity.busy)
        return max(drained, _LEAST_RATE_SHARE * batches) if drained else batches

    def _rate_of(self, *, is_bulk: bool) -> float:
        """Return the rate at which the bulk requests drain, or all others together."""
        rate, queue = self.rate, self._queue
        if is_bulk:
            measured = self._bulk_rate.per_s or (rate if queue.tokens == queue.bulk_tokens else 0.0)
            return max(measured, BULK_SHARE * rate)
        return rate * (1 - BULK_SHARE) if queue.bulk_tokens else rate

    def expected_wait(
        self,
        client: str,
        tokens: int,
        timeout_s: float | None,
        unsubmitted: int = 0,
        is_bulk: bool = False,
    ) -> ExpectedWait:
        """Return the wait of a request that arrives now; see `core.Queue`."""
        rate, queue = self._rate_of(is_bulk=is_bulk), self._queue
        if not rate:
            return NO_WAIT
        key = LineKey.of(tokens, timeout_s, is_bulk=is_bulk)
        ahead, lines, clients = queue.share(client, key)
        # Other lines of the client go on, so all of them count; other clients only as they wait.
        own = (ahead + unsubmitted) * lines
        alike = queue.bulk_tokens if is_bulk else queue.tokens - queue.bulk_tokens
        waiting = alike + unsubmitted
        wait = min(own * clients, max(own, waiting))
        each = min(tokens * lines * clients, waiting + tokens)
        return ExpectedWait(wait / rate, each / rate)

    def check(self, submission: Submission) -> None:
        """Raise if a request has to wait for too long. An empty queue admits any request.

        Raises:
            Overloaded: the request would wait for too long, it or another one would end after its
                deadline, or the queue would need too much memory.
        """
        queue = self._queue
        if not queue.tokens:
            return
        is_bulk, now = submission.is_bulk, time.monotonic()
        rate = self._rate_of(is_bulk=is_bulk)
        tokens, client, timeout_s = submission.tokens, submission.client, submission.timeout_s
        ahead, _, _ = queue.share(client, LineKey.of(tokens, timeout_s, is_bulk=is_bulk))
        most, waiting = self._limits.max_queue_tokens, queue.tokens
        free = most - waiting
        if ahead + tokens > free:  # so no line ever fills the queue (Choudhury and Hahne 1998)
            raise Overloaded(
                f"the queue holds {waiting} tokens, {ahead} of them like this request's {tokens}; "
                f"together they would be more than the {free} that are left of the limit of {most}",
                (ahead + tokens - free) / rate if rate else 1.0,
                Rejection.QUEUE_FULL,
            )
        if not rate:
            return
        wait = self.expected_wait(client, tokens, timeout_s, is_bulk=is_bulk)
        end_s, left_s = wait.seconds + wait.per_request_s, submission.deadline - now
        factor = _RETURNING if submission.returning else 1.0
        limit_s = factor * longest_wait_s(timeout_s, self._limits.max_wait_s)
        if wait.seconds > limit_s:
            raise Overloaded(too_long(wait.seconds, limit_s), wait.seconds - limit_s)
        due = math.inf if is_bulk else due_time(now, submission.deadline)
        slack_s = queue.demand.slack_s(now, self._rate_of(is_bulk=False), due, tokens)
        late_s = max(end_s - factor * _SHARE_OF_TIME * left_s, -slack_s)
        if late_s > 0:
            raise Overloaded(
                f"the request would end in about {end_s:.1f} s beside what was accepted before it, "
                f"which is too close to its time limit in {left_s:.1f} s",
                late_s,
                Rejection.DEADLINE,
            )


def longest_wait_s(timeout_s: float | None, max_wait_s: float) -> float:
    """Return the longest wait with which a request is admitted; without limits, infinity."""
    if timeout_s is not None:
        return _SHARE_OF_TIME * timeout_s
    return max_wait_s or float("inf")


def too_long(wait_s: float, limit_s: float) -> str:
    """Return the message for a request that would wait for too long."""
    return f"the request would wait about {wait_s:.1f} s, longer than its limit of {limit_s:g} s"


class PromiseKey(NamedTuple):
    """The requests of a client and a class of patience, before the engine of a model.

    The size does not count: the gate only estimates it.
    """

    model: str
    client: str
    patience: int
    is_bulk: bool = False


class Promises:
    """When refused requests may come back: the ``Retry-After`` of a refusal is a reservation.

    A line admits requests at the rate at which it drains. So each refused request of a line gets a
    time of its own, one after another. A client that comes back at that time goes before new
    requests: these are admitted only while the line is half empty as long as times are promised. So
    promises that nobody redeems never leave the workers idle.

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
        times = self.outstanding(line, now)
        at = now + wait_s
        if times:
            at = max(at, times[-1] + each_s)
        if at > now + _LONGEST_PROMISE_S:
            return _LONGEST_PROMISE_S
        if self._count >= _MOST_PROMISES // 2 and now > self._swept + 1:
            self._swept = now
            for each in list(self._times):
                self.outstanding(each, now)
        if len(times) < _MOST_PROMISES - self._count:
            self._times[line] = times
            times.append(at)
            self._count += 1
        return at - now

    def redeem(self, line: PromiseKey, now: float) -> bool:
        """Return whether a request of a line comes back as told, and take its time away."""
        times = self.outstanding(line, now)
        if not times or times[0] - _EARLY_S > now:
            return False
        times.popleft()
        self._count -= 1
        return True

    def outstanding(self, line: PromiseKey, now: float) -> deque[float]:
        """Return the times of a line that have not passed: of requests that may still come back."""
        times = self._times.get(line)
        if times is None:
            return deque()
        while times and times[0] + _LATE_S < now:
            times.popleft()
            self._count -= 1
        if not times:
            del self._times[line]
        return times
