"""The scheduler alone, on the fake engine: properties over random arrivals, and its workers."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cloze.model_store.batch import Encoding
from cloze.service.batching.admission import SchedulerLimits
from cloze.service.batching.scheduler import Scheduler
from cloze.service.core import BatchReport, BatchResult
from cloze.service.errors import DeadlineExceeded, EngineFailed
from tests.support import encodings
from tests.support.encodings import submit
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import wait_until

WAIT_S = 60.0
LIMITS = SchedulerLimits(
    workers=2, max_batch_tokens=64, max_queue_tokens=10_000, stall_timeout_s=30.0
)


def sized(length: int, value: int = 1) -> Encoding:
    return encodings.encoding([value] * length, embed=True)


def later(seconds: float = WAIT_S) -> float:
    return time.monotonic() + seconds


@contextmanager
def running(
    engine: FakeEngine,
    *,
    on_batch: Callable[[BatchReport], None] = lambda _: None,
    **limits: float,
) -> Iterator[Scheduler]:
    scheduler = Scheduler(engine, replace(LIMITS, **limits), on_batch=on_batch)
    scheduler.start()
    try:
        yield scheduler
    finally:
        engine.gate.set()
        scheduler.close()


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
    """Whatever arrives: each future ends; answers are the request's own, in order; batches keep
    their rules.
    """
    engine = FakeEngine(poison=lambda one: int(one.input_ids[0]) in poison)
    engine.supports_varlen = mixed
    reports: list[BatchReport] = []
    if held:
        engine.gate.clear()
    limits = {"workers": workers, "max_batch_tokens": budget}
    with running(engine, on_batch=reports.append, **limits) as scheduler:
        futures = []
        for sizes, fate in arrivals:
            future = submit(
                scheduler, [sized(*one) for one in sizes], later(-1 if fate == "late" else WAIT_S)
            )
            if fate == "cancel":
                future.cancel()
            futures.append(future)
        engine.gate.set()
        assert not wait([each for each in futures if not each.cancelled()], WAIT_S).not_done
        for future, (sizes, fate) in zip(futures, arrivals, strict=True):
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


def test_a_short_text_runs_while_all_workers_run_long_ones() -> None:
    """Long texts of earlier and of later requests wait meanwhile."""
    release = threading.Event()

    class LongTextsWait(FakeEngine):
        def run(self, batch: list[Encoding], *, alone: bool = False) -> list:  # type: ignore[override, type-arg]
            if len(batch[0]) > 10:
                release.wait(WAIT_S)
            return super().run(batch)

    with running(LongTextsWait(), workers=2, max_batch_tokens=10) as scheduler:
        long = [submit(scheduler, [sized(20 + i)], later()) for i in range(4)]
        wait_until(lambda: len(scheduler._watchdog._runs) == 2)
        for value in (1, 2):
            assert sums(submit(scheduler, [sized(5, value)], later())) == [5.0 * value]
        assert not any(future.done() for future in long)
        release.set()
        assert [sums(future) for future in long] == [[20.0], [21.0], [22.0], [23.0]]


def test_a_short_text_that_waits_already_runs_beside_a_long_one() -> None:
    """Nothing arrives any more that would wake the worker for short texts."""
    begin, release = threading.Event(), threading.Event()

    class Blocked(FakeEngine):
        def run(self, batch: list[Encoding], *, alone: bool = False) -> list:  # type: ignore[override, type-arg]
            self.entered.set()
            {5: begin, 20: release}.get(len(batch[0]), self.gate).wait(WAIT_S)
            return super().run(batch)

    engine = Blocked()
    with running(engine, workers=1, max_batch_tokens=10) as scheduler:
        first = submit(scheduler, [sized(5)], later())
        assert engine.entered.wait(WAIT_S)
        long, short = (submit(scheduler, [sized(length)], later()) for length in (20, 6))
        begin.set()
        assert sums(first) == [5.0]
        assert sums(short) == [6.0]
        assert not long.done()
        release.set()
        assert sums(long) == [20.0]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_one_worker_is_left_to_questions_while_they_come(workers: int) -> None:
    engine = FakeEngine()
    with running(engine, workers=workers) as scheduler:
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
