"""Queues with a policy of admission, in virtual time: our scheduler's, and those that drop.

`SchedulerQueue` runs the code of `service.batching.scheduler`. `DroppingQueue` admits all requests;
a `Discipline` (`disciplines`) decides which of them run and which are dropped. All queues form
batches of one length.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Protocol
from unittest.mock import patch

import numpy as np

from cloze.bench.studies.virtual_time import CORES, BatchQueue
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.manifest import Precision
from cloze.service.batching import admission, fair_queue, scheduler
from cloze.service.batching.admission import SchedulerLimits
from cloze.service.batching.fair_queue import QueuedEncoding
from cloze.service.batching.scheduler import Scheduler
from cloze.service.core import BatchResult, Device, Overloaded, Submission
from cloze.service.settings import Settings


class StillEngine:
    """The engine of a scheduler whose threads never start: in virtual time nothing runs."""

    device = Device.CPU
    precision = Precision.FP32
    reason = "nothing runs"
    supports_varlen = False

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        """Raise; see `Engine`."""
        raise NotImplementedError

    def probe(self) -> None:
        """Raise; see `Engine`."""
        raise NotImplementedError


DEFAULTS = Settings.model_construct()
"""The default settings of a server."""

MAX_TOKENS = 512
"""Most tokens of a text, and of a batch on a CPU."""


class Fate(StrEnum):
    """What became of a request."""

    WAITING = "waiting"
    ANSWERED = "answered"
    REFUSED = "refused"
    """At its arrival."""
    DROPPED = "dropped"
    """After it had waited."""


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request of one text.

    Attributes:
        client: its client.
        tokens: length of the text.
        arrived: virtual time of its arrival.
        started: virtual time at which its batch began.
        ended: virtual time at which it was answered, refused or dropped.
        fate: what became of it.
    """

    client: str
    tokens: int
    arrived: float
    started: float = math.inf
    ended: float = math.inf
    fate: Fate = Fate.WAITING


class Clock:
    """Virtual time, in place of the module `time`.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the virtual time."""
        return self.now


@contextmanager
def virtual_time(clock: Clock) -> Iterator[None]:
    """Give the classes of the scheduler a virtual time until the context ends."""
    with ExitStack() as stack:
        for module in (admission, fair_queue, scheduler):
            stack.enter_context(patch.object(module, "time", clock))
        yield


OnEnd = Callable[[SimulatedRequest, Fate], None]
"""Called when a request is answered or dropped."""


class AdmissionQueue(BatchQueue[SimulatedRequest], Protocol):
    """A queue with a policy of admission."""

    def offer(self, request: SimulatedRequest) -> bool:
        """Return whether the queue admits a request that arrives now."""
        ...

    def end_run(self, batch: list[SimulatedRequest]) -> None:
        """End the requests of a batch that has run."""
        ...


@lru_cache(MAX_TOKENS)
def encoding(length: int) -> Encoding:
    """Return an encoding of so many tokens, without content."""
    ids = np.zeros(length, np.int32)
    return Encoding(ids, ids, {})


class SchedulerQueue:
    """The queue and the admission of our scheduler, with its default settings.

    Args:
        clock: the virtual time; the caller is inside `virtual_time`.
        on_end: called when a request is answered or dropped.
        max_wait_s: longest expected wait; 0: no limit.
        max_queue_tokens: most tokens that wait.
        timeout_s: seconds after its arrival at which a request is dropped.
        fair_shares: whether each client has a share; else all requests are of one client.
        stated_s: the time limit that each request states; None: none does.
    """

    def __init__(
        self,
        clock: Clock,
        on_end: OnEnd,
        *,
        max_wait_s: float = 0.0,
        max_queue_tokens: int = DEFAULTS.max_queue_tokens,
        timeout_s: float = DEFAULTS.request_timeout_ms / 1000,
        fair_shares: bool = False,
        stated_s: float | None = None,
    ) -> None:
        self._clock, self._on_end = clock, on_end
        self._stated_s, self._fair_shares = stated_s, fair_shares
        self._timeout_s = timeout_s if stated_s is None else stated_s
        limits = SchedulerLimits(
            workers=CORES,
            max_batch_tokens=MAX_TOKENS,
            max_queue_tokens=max_queue_tokens,
            stall_timeout_s=DEFAULTS.stall_timeout_ms / 1000,
            batch_latency_s=DEFAULTS.batch_latency_ms / 1000,
            max_wait_s=max_wait_s,
        )
        self._scheduler = Scheduler(StillEngine(), limits)
        self._requests: dict[Future[BatchResult], SimulatedRequest] = {}
        self._running: dict[SimulatedRequest, QueuedEncoding] = {}

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens of a batch now."""
        return self._scheduler._batch_tokens()

    def __bool__(self) -> bool:
        return self._scheduler._queue.tokens > 0

    def has_up_to(self, length: int) -> bool:
        """Return whether a text of at most so many tokens waits."""
        return self._scheduler._queue.has_up_to(length)

    def offer(self, request: SimulatedRequest) -> bool:
        """Return whether the scheduler admits a request."""
        client = request.client if self._fair_shares else ""
        try:
            deadline, batch = self._clock.now + self._timeout_s, [encoding(request.tokens)]
            future = self._scheduler.submit(Submission(deadline, batch, client, self._stated_s))
        except Overloaded:
            return False
        self._requests[future] = request
        future.add_done_callback(self._end)
        return True

    def _end(self, future: Future[BatchResult]) -> None:
        request = self._requests.pop(future)
        self._on_end(request, Fate.DROPPED if future.exception() else Fate.ANSWERED)

    def take_batch(self, *, takers: int = 1, longest: int | None = None) -> list[SimulatedRequest]:
        """Remove a batch; see `virtual_time.BatchQueue`."""
        taken = self._scheduler._take_now(takers=takers, longest=longest).encodings
        batch = [self._requests[queued.request] for queued in taken]
        for request in batch:
            request.started = self._clock.now
        self._running.update(zip(batch, taken, strict=True))
        return batch

    def end_run(self, batch: list[SimulatedRequest]) -> None:
        """End the requests of a batch that has run."""
        seconds = self._clock.now - batch[0].started
        queued = [self._running.pop(request) for request in batch]
        self._scheduler._deliver(queued, [{}] * len(batch), seconds)


class Discipline(Protocol):
    """Decides which of the waiting requests run next, and which are dropped instead."""

    def newest_first(self, now: float) -> bool:
        """Return whether the newest request is next; else the oldest one is."""
        ...

    def drops(self, now: float, wait_s: float) -> bool:
        """Return whether a request whose turn it is after a wait is dropped."""
        ...

    def emptied(self, now: float) -> None:
        """Note that no request waits."""
        ...


class DroppingQueue:
    """Admits all requests, in the order of their arrival, and drops some when their turn comes.

    Args:
        clock: the virtual time.
        on_end: called when a request is answered or dropped.
        discipline: what is next, and what is dropped.
        max_batch_tokens: most tokens of a batch.
    """

    def __init__(
        self, clock: Clock, on_end: OnEnd, discipline: Discipline, max_batch_tokens: int
    ) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._clock, self._on_end, self._discipline = clock, on_end, discipline
        self._timeout_s = DEFAULTS.request_timeout_ms / 1000
        self._groups: dict[int, deque[SimulatedRequest]] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def has_up_to(self, length: int) -> bool:
        """Return whether a text of at most so many tokens waits."""
        return any(tokens <= length for tokens in self._groups)

    def offer(self, request: SimulatedRequest) -> bool:
        """Admit a request."""
        self._groups.setdefault(request.tokens, deque()).append(request)
        return True

    def take_batch(self, *, takers: int = 1, longest: int | None = None) -> list[SimulatedRequest]:
        """Remove a batch, and drop requests; see `virtual_time.BatchQueue`."""
        newest = self._discipline.newest_first(self._clock.now)
        side = -1 if newest else 0
        lengths = [tokens for tokens in self._groups if longest is None or tokens <= longest]
        order = max if newest else min
        tokens = order(lengths, key=lambda length: self._groups[length][side].arrived)
        group = self._groups[tokens]
        most = max(1, min(self.max_batch_tokens // tokens, -(-len(group) // takers)))
        batch: list[SimulatedRequest] = []
        while group and len(batch) < most:
            request = group.pop() if newest else group.popleft()
            wait_s = self._clock.now - request.arrived
            if wait_s > self._timeout_s or self._discipline.drops(self._clock.now, wait_s):
                self._on_end(request, Fate.DROPPED)
            else:
                request.started = self._clock.now
                batch.append(request)
        if not group:
            del self._groups[tokens]
        if not self._groups:
            self._discipline.emptied(self._clock.now)
        return batch

    def end_run(self, batch: list[SimulatedRequest]) -> None:
        """End the requests of a batch that has run."""
        for request in batch:
            self._on_end(request, Fate.ANSWERED)
