"""The scheduler alone, on the fake engine: properties over random arrivals, and its workers."""

import re
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import replace
from queue import Queue

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cloze.model_store.batch import Encoding
from cloze.service.batching.admission import SchedulerLimits
from cloze.service.core import BatchFill, BatchReport, BatchResult
from cloze.service.errors import DeadlineExceeded, EngineDead, EngineFailed, Overloaded
from tests.support.encodings import later, sized, submit
from tests.support.fake_engine import FakeEngine, running
from tests.support.waiting import wait_until

WAIT_S = 60.0
LIMITS = SchedulerLimits(
    workers=2, max_batch_tokens=64, max_queue_tokens=10_000, stall_timeout_s=30.0
)


def sums(future: "Future[BatchResult]") -> list[float]:
    return [float(output["embedding"].array[0]) for output in future.result(WAIT_S).outputs]


requests = st.lists(
    st.tuples(
        st.lists(
            st.tuples(st.integers(1, 20), st.integers(1, 50)), min_size=1, max_size=8
        ),  # (length, value) of each encoding
        st.sampled_from(["keep", "keep", "keep", "cancel", "late"]),
    ),
    min_size=1,
    max_size=25,
)


@settings(
    max_examples=150, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # shrinking a race takes for ever
@given(
    arrivals=requests,
    workers=st.integers(1, 3),
    held=st.booleans(),
    mixed=st.booleans(),
    budget=st.sampled_from([64, 8]),  # most encodings are longer than 8
    poison=st.sets(st.integers(1, 50), max_size=3),
)
def test_every_request_ends_once_and_rightly(
    arrivals: list[tuple[list[tuple[int, int]], str]],
    workers: int,
    held: bool,
    mixed: bool,
    budget: int,
    poison: set[int],
) -> None:
    """Whatever arrives: answers are the request's own, in order; batches keep their rules."""
    engine = FakeEngine(poison=lambda one: int(one.input_ids[0]) in poison)
    engine.supports_varlen = mixed
    reports: list[BatchReport] = []
    if held:
        engine.gate.clear()
    limits = {"workers": workers, "max_batch_tokens": budget}
    with running(engine, replace(LIMITS, **limits), on_batch=reports.append) as scheduler:
        futures = []
        for sizes, fate in arrivals:
            deadline = later(-1 if fate == "late" else WAIT_S)
            try:
                future = submit(scheduler, [sized(*one) for one in sizes], deadline)
            except Overloaded:  # a batch has ended, so that the rate is known
                assert fate == "late"
                continue
            if fate == "cancel":
                future.cancel()
            futures.append((future, sizes, fate))
        engine.gate.set()
        accepted = [future for future, _, _ in futures if not future.cancelled()]
        assert not wait(accepted, WAIT_S).not_done
        for future, sizes, fate in futures:
            if future.cancelled():
                assert fate == "cancel"
            elif fate == "late":
                assert isinstance(future.exception(), DeadlineExceeded)
            elif any(value in poison for _, value in sizes):
                assert isinstance(future.exception(), EngineFailed)
            else:
                assert sums(future) == [length * value for length, value in sizes]
        deadline = later()
        while scheduler.state.tokens and time.monotonic() < deadline:
            time.sleep(0.001)
        assert scheduler.state.tokens == 0
    assert not scheduler._queue.lines, "a finished request is forgotten"
    assert sum(report.sequences for report in reports) == sum(map(len, engine.batches))
    for batch in engine.batches:
        assert mixed or len({len(one) for one in batch}) == 1, "a batch has one length"
        assert len(batch) == 1 or sum(map(len, batch)) <= budget


class Blocked(FakeEngine):
    """An engine in which texts of 5 tokens and long ones wait for an event each."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.release = threading.Event(), threading.Event()

    def run(self, batch: list[Encoding], *, alone: bool = False) -> list:  # type: ignore[override, type-arg]
        self.entered.set()
        length = len(batch[0])
        event = self.release if length > 10 else self.begin if length == 5 else self.gate
        event.wait(WAIT_S)
        return super().run(batch)


def test_a_short_text_runs_while_all_workers_run_long_ones() -> None:
    """Long texts of earlier and of later requests wait meanwhile."""
    engine = Blocked()
    with running(engine, replace(LIMITS, max_batch_tokens=10)) as scheduler:
        long = [submit(scheduler, [sized(20 + i)], later()) for i in range(4)]
        wait_until(lambda: len(scheduler._watchdog._runs) == 2)
        for value in (1, 2):
            assert sums(submit(scheduler, [sized(6, value)], later())) == [6.0 * value]
        assert not any(future.done() for future in long)
        engine.release.set()
        assert [sums(future) for future in long] == [[20.0], [21.0], [22.0], [23.0]]


def test_a_short_text_that_waits_already_runs_beside_a_long_one() -> None:
    """Nothing arrives any more that would wake the worker for short texts."""
    engine = Blocked()
    with running(engine, replace(LIMITS, workers=1, max_batch_tokens=10)) as scheduler:
        first = submit(scheduler, [sized(5)], later())
        assert engine.entered.wait(WAIT_S)
        long, short = (submit(scheduler, [sized(length)], later()) for length in (20, 6))
        engine.begin.set()
        assert sums(first) == [5.0]
        assert sums(short) == [6.0]
        assert not long.done()
        engine.release.set()
        assert sums(long) == [20.0]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_one_worker_is_left_to_questions_while_they_come(workers: int) -> None:
    engine = FakeEngine()
    with running(engine, replace(LIMITS, workers=workers)) as scheduler:
        sums(submit(scheduler, [sized(3)], later()))
        engine.gate.clear()
        bulk = submit(scheduler, [sized(64)] * 8, later(), is_bulk=True)
        wait_until(lambda: len(scheduler._on_bulk) == max(1, workers - 1))
        wait_until(lambda: scheduler._idle_workers == workers - max(1, workers - 1))
        assert scheduler._queue.tokens == 64 * (8 - max(1, workers - 1))
        assert scheduler.state.tokens == 0
        question = submit(scheduler, [sized(3)], later())
        if workers > 1:
            wait_until(lambda: scheduler.state.tokens == 0)
        else:
            assert scheduler.state.tokens == 3
        engine.gate.set()
        assert sums(question) == [3.0]
        assert sums(bulk) == [64.0] * 8


def test_a_run_that_hangs_is_a_dead_engine() -> None:
    engine = FakeEngine()
    with running(engine, replace(LIMITS, workers=1, stall_timeout_s=0.2)) as scheduler:
        assert sums(submit(scheduler, [sized(3)], later())) == [3.0]  # measures the engine
        engine.gate.clear()
        futures = [submit(scheduler, [sized(length)], later()) for length in (3, 4)]
        for future in futures:
            assert isinstance(future.exception(WAIT_S), EngineDead)
        assert re.fullmatch(r"a run took longer than 0\.[2-9] s", str(scheduler.dead_reason))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_engine_that_is_lost_while_nobody_asks_is_dead(workers: int) -> None:
    engine, deaths, reports = FakeEngine(), Queue(), list[BatchReport]()
    limits = replace(LIMITS, workers=workers, canary_s=0.01)
    with running(engine, limits, on_batch=reports.append, on_dead=deaths.put) as scheduler:
        wait_until(lambda: len(reports) > 1)
        assert {report.fill for report in reports} == {BatchFill.CANARY}
        assert sums(submit(scheduler, [sized(3)], later())) == [3.0]
        engine.broken = True
        reason = deaths.get(timeout=WAIT_S)
    assert reason == "it could not repeat its golden outputs while idle (RuntimeError)"
    assert scheduler.dead_reason == reason
