"""One order of steps of clients and workers, and what must be true after each step.

A `Schedule` keeps its own account of requests: which encodings wait, which ones a worker has taken,
which ones have run, and how each request must have ended. After each step, the scheduler must
agree.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import pytest

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.service.batching.admission import SchedulerLimits
from cloze.service.batching.fair_queue import LineKey, Submission
from cloze.service.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineFailed,
    ServiceError,
    ShuttingDown,
)
from tests.support import encodings
from tests.support.fake_engine import FakeEngine
from tests.support.stepped import SteppedScheduler, Worker

MAX_BATCH_TOKENS = 14
CANCELLED = "cancelled"
RESULT = "result"

Step = tuple[str, int]
"""A kind of step, and the index of a request or of a worker."""

Request = tuple[str, Sequence[int]]
"""The client of a request, and the lengths of its encodings."""


@dataclass(frozen=True)
class Case:
    """What every order begins with: the engine, the requests and the first steps."""

    varlen: bool
    workers: int
    """Workers without the one for short texts."""
    requests: Sequence[Request]
    start: Sequence[Step]
    depth: int
    """Further steps in the fast test."""


@dataclass
class ExpectedRequest:
    """What must be true of a request; positions are those of its encodings."""

    lengths: Sequence[int]
    future: Submission | None = None
    queued: set[int] = field(default_factory=set)
    ran: set[int] = field(default_factory=set)
    is_expired: bool = False
    outcome: str | type[ServiceError] | None = None
    ends: int = 0

    @property
    def is_pending(self) -> bool:
        """Whether the request was admitted and has not ended."""
        return self.future is not None and self.outcome is None

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait."""
        return sum(self.lengths[each] for each in self.queued) if self.is_pending else 0


class Engine(FakeEngine):
    """A fake engine that calls `during` once, in the middle of its next run."""

    during: Callable[[], None] = staticmethod(lambda: None)

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        during, self.during = self.during, lambda: None
        during()
        return super().run(batch)


class Schedule:
    """A scheduler, the steps that were made, and what must be true after them."""

    def __init__(self, case: Case) -> None:
        self.engine = Engine()
        self.engine.supports_varlen = case.varlen
        limits = SchedulerLimits(case.workers, MAX_BATCH_TOKENS, 1000, stall_timeout_s=1000.0)
        self.scheduler = SteppedScheduler(self.engine, limits)
        self.workers = self.scheduler.workers
        self.regular_workers = self.workers[: case.workers]
        self.clients = [client for client, _ in case.requests]
        self.requests = [ExpectedRequest(lengths) for _, lengths in case.requests]
        self.submitted = 0
        self.is_closed = self.is_dead = False
        self.runs = 0  # encodings that the engine ran to the end
        self.steps: list[Step] = []

    def possible(self) -> Iterator[Step]:
        """Yield the steps that can be made now."""
        if self.submitted < len(self.requests):
            yield "submit", self.submitted
        for index, request in enumerate(self.requests):
            if request.is_pending:
                yield "cancel", index
                if request.queued and not request.is_expired:
                    yield "expire", index
        regular = [worker for worker in self.regular_workers if worker.is_free]
        short = [worker for worker in self.workers if worker not in self.regular_workers]
        for worker in regular[:1] + [worker for worker in short if worker.is_free]:
            yield "look", worker.number  # which of the free workers looks makes no difference
        for worker in self.workers:
            if worker.batch:
                for kind in ("run",) if self.is_dead else ("run", "fail", "break", "stall"):
                    yield kind, worker.number
        if not self.is_closed:
            yield "close", 0

    def make(self, step: Step) -> None:
        """Make a step, and check what must be true after it."""
        kind, index = step
        self.steps.append(step)
        getattr(self, f"_{kind}")(index)
        self._check()

    def _submit(self, index: int) -> None:
        self.submitted += 1
        request = self.requests[index]
        lengths = request.lengths
        batch = [encodings.encoding([10 * index + 1] * length, embed=True) for length in lengths]
        deadline, client = time.monotonic() + 1000, self.clients[index]
        submit = partial(encodings.submit, self.scheduler, batch, deadline, client=client)
        if self.is_dead or self.is_closed:
            with pytest.raises(EngineDead if self.is_dead else ShuttingDown):
                submit()
            return
        waiting = sum(worker.condition is not None for worker in self.regular_workers)
        future = submit()
        woken = waiting - sum(worker.condition is not None for worker in self.regular_workers)
        assert woken == min(waiting, len(lengths)), "a worker waits although it has work"
        request.future, request.queued = future, set(range(len(lengths)))
        future.add_done_callback(lambda _: setattr(request, "ends", request.ends + 1))

    def _cancel(self, index: int) -> None:
        request = self.requests[index]
        assert request.future is not None
        assert request.future.cancel()
        request.outcome = CANCELLED

    def _expire(self, index: int) -> None:
        request = self.requests[index]
        assert request.future is not None
        request.future.terms = request.future.terms._replace(deadline=-math.inf)
        request.is_expired = True

    def _look(self, index: int) -> None:
        worker = self.workers[index]
        self.scheduler.look(worker)
        if worker.batch and worker not in self.regular_workers:
            assert all(each.condition is None for each in self.regular_workers)
            assert all(not each.batch or is_long(each) for each in self.regular_workers)
        for queued in worker.batch:
            request = self._of(queued.request)
            assert request.is_pending, "an encoding of an ended request is taken"
            assert not request.is_expired, "an encoding is taken after its deadline"
            request.queued.remove(queued.position)  # fails if it was taken before
        for request in self.requests:
            if request.is_pending and request.is_expired and is_done(request):
                request.outcome = DeadlineExceeded

    def _run(self, index: int) -> None:
        self._deliver(self.workers[index], failed=0)

    def _fail(self, index: int) -> None:
        """Run a batch whose first encoding the engine cannot run."""
        first = self.workers[index].batch[0]
        self.engine.poison = lambda encoding: encoding is first.encoding
        request = self._of(first.request)
        if request.is_pending:
            request.outcome = EngineFailed
        self._deliver(self.workers[index], failed=1)
        self.engine.poison = lambda _: False

    def _break(self, index: int) -> None:
        """Let the engine fail its golden outputs as well."""
        self.engine.broken = True
        self.engine.poison = lambda _: True
        request = self._of(self.workers[index].batch[0].request)
        if request.is_pending:
            request.outcome = EngineFailed
        if not self.is_closed:
            self.is_dead = True
            self._end_pending(EngineDead)
        self._deliver(self.workers[index], failed=len(self.workers[index].batch))
        self.engine.broken, self.engine.poison = False, lambda _: False

    def _stall(self, index: int) -> None:
        """Declare the engine dead in the middle of a run, which then ends."""
        self.engine.during = lambda: self.scheduler._die("a run took longer than 1 s")
        if not self.is_closed:
            self.is_dead = True
            self._end_pending(EngineDead)
        self._deliver(self.workers[index], failed=0)

    def _close(self, _: int) -> None:
        self.scheduler.close()
        self.is_closed = True
        self._end_pending(ShuttingDown)

    def _of(self, future: Future) -> ExpectedRequest:  # type: ignore[type-arg]
        return next(request for request in self.requests if request.future is future)

    def _end_pending(self, outcome: type[ServiceError]) -> None:
        for request in self.requests:
            if request.is_pending:
                request.outcome = outcome

    def _deliver(self, worker: Worker, *, failed: int) -> None:
        """Run a worker's batch; expect outputs of all encodings but the first ones."""
        ran = [] if self.scheduler.dead_reason else worker.batch[failed:]
        self.scheduler.run(worker)
        self.runs += len(ran)
        for queued in ran:
            request = self._of(queued.request)
            request.ran.add(queued.position)
            if request.is_pending and len(request.ran) == len(request.lengths):
                request.outcome = RESULT

    def _check(self) -> None:
        scheduler, queue = self.scheduler, self.scheduler._queue
        for request in self.requests:
            if request.future is not None:
                check_outcome(request, request.future)
                assert request.future.queued_tokens == request.queued_tokens
        assert scheduler.state.tokens == sum(each.queued_tokens for each in self.requests)
        assert sum(queue.demand._tokens.values()) == scheduler.state.tokens
        assert min(queue.demand._tokens.values(), default=1) > 0
        assert set(queue.lines) == {each.future for each in self.requests if each.is_pending}
        assert sum(map(len, self.engine.batches)) == self.runs
        assert (scheduler.dead_reason is not None, len(scheduler.deaths)) == (
            self.is_dead,
            self.is_dead,
        )
        for name in set(self.clients):
            self._check_client(name)
        if scheduler.state.tokens:
            self._check_wake_ups()
        if self.is_closed or self.is_dead:
            assert all(worker.condition is None for worker in self.workers), "a worker never ends"

    def _check_client(self, name: str) -> None:
        """Check the numbers from which the expected wait of a client follows."""
        client = self.scheduler._queue._clients.get((name, False))
        lines = client.lines if client else {}
        pending: dict[LineKey, list[ExpectedRequest]] = {}
        for request, owner in zip(self.requests, self.clients, strict=True):
            if owner == name and request.is_pending:
                pending.setdefault(LineKey.of(sum(request.lengths), None), []).append(request)
        assert lines.keys() >= pending.keys()
        for key, line in lines.items():
            requests = pending.get(key, [])
            assert line.requests == len(requests)
            assert line.tokens == sum(each.queued_tokens for each in requests)

    def _check_wake_ups(self) -> None:
        """Check that a worker will look for what waits: it is awake, or runs another batch."""
        regular = self.regular_workers
        assert any(worker.condition is None for worker in regular), "nobody looks"
        short = any(
            request.is_pending and request.lengths[position] <= MAX_BATCH_TOKENS
            for request in self.requests
            for position in request.queued
        )
        if short and all(map(is_long, regular)) and len(self.workers) > len(regular):
            assert self.workers[-1].condition is None, "nobody looks for short texts"

    def finish(self) -> None:
        """Let the workers do what is left, and close; nothing may remain."""
        self._work_off()
        assert not any(request.is_pending for request in self.requests), "a request is lost"
        queue = self.scheduler._queue
        assert (queue.tokens, queue._clients) == (0, {})
        self.make(("close", 0))
        self._work_off()
        assert all(worker.ended for worker in self.workers)
        assert all(request.ends == (request.future is not None) for request in self.requests)
        assert not self.scheduler._watchdog._runs

    def _work_off(self) -> None:
        while steps := [step for step in self.possible() if step[0] in ("look", "run")]:
            self.make(steps[0])


def is_long(worker: Worker) -> bool:
    """Return whether a worker holds a text that is longer than a batch."""
    return bool(worker.batch) and worker.batch[0].tokens > MAX_BATCH_TOKENS


def is_done(request: ExpectedRequest) -> bool:
    """Return whether the future of a request has ended."""
    return request.future is not None and request.future.done()


def check_outcome(request: ExpectedRequest, future: Submission) -> None:
    """Check that a request has ended as expected, once, or is pending."""
    assert request.ends == (request.outcome is not None)
    assert future.done() == (request.outcome is not None)
    if request.outcome == CANCELLED:
        assert future.cancelled()
    elif request.outcome == RESULT:
        outputs = [output["embedding"].array[0] for output in future.result(0).outputs]
        value = outputs[0] / request.lengths[0]
        assert outputs == [value * length for length in request.lengths], "outputs change places"
    elif request.outcome is not None:
        assert type(future.exception(0)) is request.outcome
