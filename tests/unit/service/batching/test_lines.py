"""The order of work and the promises of admission, in virtual time."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloze.service.batching.admission import SchedulerLimits, WaitLimits
from cloze.service.batching.fair_queue import Demand
from cloze.service.core import BatchResult
from cloze.service.errors import Overloaded
from tests.support.encodings import encoding, submit
from tests.support.fake_engine import FakeEngine
from tests.support.stepped import SteppedScheduler
from tests.support.virtual_time import VirtualClock

RATE = 1000.0
"""Tokens per second of the worker."""


@dataclass(eq=False)
class Sent:
    """A request that was accepted, and what became of it."""

    deadline: float
    future: "Future[BatchResult]"
    ended: float = math.inf


@dataclass
class Server:
    """A scheduler and its worker, in virtual time."""

    scheduler: SteppedScheduler
    clock: VirtualClock
    rate: float = RATE
    sent: list[Sent] = field(default_factory=list)

    def submit(
        self, lengths: Sequence[int], client: str, timeout_s: float | None, default_s: float = 30.0
    ) -> Sent | None:
        deadline = self.clock.now + (timeout_s or default_s)
        encodings = [encoding([1] * length, embed=True) for length in lengths]
        try:
            future = submit(self.scheduler, encodings, deadline, client=client, timeout_s=timeout_s)
        except Overloaded:
            return None
        sent = Sent(deadline, future)
        future.add_done_callback(lambda _: setattr(sent, "ended", self.clock.now))
        self.sent.append(sent)
        return sent

    def run_until(self, time: float) -> None:
        """Run batches until none waits, or until a time."""
        while self.scheduler._queue.tokens and self.clock.now < time:
            worker = self.scheduler.workers[0]
            self.scheduler.look(worker)
            if batch := worker.batch:
                tokens = sum(queued.tokens for queued in batch)
                self.clock.now += tokens / self.rate
                self.scheduler._deliver(batch, [{}] * len(batch), tokens / self.rate)
        self.clock.now = max(self.clock.now, time if time < math.inf else 0.0)


@contextmanager
def server(max_wait_s: float = 4.0) -> Iterator[Server]:
    clock = VirtualClock()
    limits = SchedulerLimits(1, 20, 10**6, stall_timeout_s=1000.0, waits=WaitLimits(max_wait_s))
    scheduler = SteppedScheduler(FakeEngine(), limits, clock)
    scheduler._admission.tokens_per_s = RATE
    yield Server(scheduler, clock)
    scheduler.close()


arrivals = st.lists(
    st.tuples(
        st.floats(0, 0.3),  # seconds since the one before
        st.sampled_from("abcd"),
        st.sampled_from([None, None, 0.5, 1.0, 2.0, 5.0]),
        st.lists(st.integers(1, 20), min_size=1, max_size=12),
    ),
    max_size=120,
)


@settings(max_examples=60, deadline=None)
@given(arrivals=arrivals)
def test_what_was_accepted_ends_in_time_whatever_comes_later(
    arrivals: list[tuple[float, str, float | None, list[int]]],
) -> None:
    with server() as served:
        due = 0.0
        for gap, client, timeout_s, lengths in arrivals:
            due += gap
            served.run_until(due)
            served.submit(lengths, client, timeout_s, default_s=8.0)
        served.run_until(math.inf)
        for sent in served.sent:
            assert sent.future.exception() is None
            assert sent.ended <= sent.deadline


dues = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), max_size=20)


@given(waiting=dues, new=st.tuples(st.integers(0, 50), st.integers(1, 40)))
def test_slack_is_the_least_over_all_due_times(
    waiting: list[tuple[int, int]], new: tuple[int, int]
) -> None:
    demand = Demand()
    for due, tokens in waiting:
        demand.add(due + 0.05, tokens)
    every = [*waiting, new]

    def slack(least: float) -> float:
        return min(
            due - sum(tokens for other, tokens in every if other <= due)
            for due, _ in every
            if due >= least
        )

    found = demand.slack_s(0.0, 1.0, new[0] + 0.05, new[1])
    exact = slack(new[0])
    assert found == pytest.approx(exact) or 0 < found < exact, "exact, or a lower bound above zero"
    for due, tokens in waiting:
        demand.add(due + 0.05, -tokens)
    assert demand.slack_s(0.0, 1.0) == math.inf
