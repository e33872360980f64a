"""The scheduler: what it passes to the engine, how requests end, its workers and its end."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.service import errors
from cloze.service.batching.admission import Activity, SchedulerLimits, WaitLimits
from cloze.service.batching.fair_queue import ExpectedWait, LineKey
from cloze.service.batching.scheduler import Scheduler, Watchdog
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import BatchFill, BatchReport
from tests.support.encodings import later, sized, submit
from tests.support.fake_engine import FakeEngine, running
from tests.support.refusals import refused
from tests.support.stepped import SteppedScheduler
from tests.support.virtual_time import VirtualClock
from tests.support.waiting import wait_until

LIMITS = SchedulerLimits(workers=1, max_batch_tokens=20, max_queue_tokens=1000, stall_timeout_s=8.0)


class Recording(FakeEngine):
    """An engine that notes whether each batch is alone, and the priority of the thread."""

    def __init__(self) -> None:
        super().__init__()
        self.alone: list[bool] = []
        self.nice: list[int] = []

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        self.alone.append(alone)
        self.nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return super().run(batch, alone=alone)


class Probed(FakeEngine):
    """An engine whose golden batches take 0.5 s, and note what the watchdog allows them."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock, self.allowed = clock, list[float]()
        self.scheduler: Scheduler

    def probe(self) -> None:
        self.allowed += [limit_s for limit_s, _ in self.scheduler._watchdog._runs.values()]
        self.clock.sleep(0.5)


def test_a_golden_batch_may_take_ten_times_as_long_as_the_last_one() -> None:
    engine = Probed(clock := VirtualClock())
    made = engine.scheduler = SteppedScheduler(engine, LIMITS, clock)
    made._run_canary(0)
    made._run_canary(0)
    assert engine.allowed == [68, 13]


def stepped(clock: Clock = CLOCK, **changes: Any) -> SteppedScheduler:
    return SteppedScheduler(FakeEngine(), replace(LIMITS, **changes), clock)


def alive(scheduler: Scheduler) -> list[str]:
    return [thread.name for thread in scheduler._threads if thread.is_alive()]


def test_a_batch_is_reported() -> None:
    reports: list[BatchReport] = []
    engine = FakeEngine()
    with running(engine, LIMITS, on_batch=reports.append) as made:
        engine.gate.clear()
        submit(made, [sized(5)], later(), trace="00-1")
        engine.entered.wait(20)
        futures = [
            submit(made, [sized(6, 2), sized(6, 3)], later(), trace="00-2"),
            submit(made, [sized(6)], later(), trace=""),
            submit(made, [sized(6)], later(), trace="00-3"),
        ]
        assert made.state.tokens == 24
        begin = time.monotonic()
        wait_until(lambda: time.monotonic() > begin + 0.02)
        engine.gate.set()
        sums = [output["embedding"].array[0] for output in futures[0].result(20).outputs]
        futures[2].result(20)
        assert sums == [12, 18]
    assert [(report.sequences, report.tokens, report.fill) for report in reports] == [
        (1, 5, BatchFill.WAITING), (3, 18, BatchFill.TOKENS), (1, 6, BatchFill.WAITING),
    ]  # fmt: skip
    assert [set(report.traces) for report in reports] == [{"00-1"}, {"00-2"}, {"00-3"}]
    assert reports[0].seconds >= 0.02
    assert 0 <= reports[1].seconds < 20


def test_a_result_has_the_times_of_its_request() -> None:
    clock = VirtualClock(1000.0)
    made = stepped(clock)
    (worker, _) = made.workers

    class Timed(FakeEngine):
        def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
            clock.now += 0.5
            return super().run(batch, alone=alone)

    made._engine = Timed()
    future = submit(made, [sized(5), sized(6)], 2000.0)
    for _ in range(2):
        clock.now += 0.25
        made.look(worker)
        made.run(worker)
    result = future.result(0)
    assert (result.queue_s, result.inference_s) == (0.25, 1.25), "of the first, until the last"


def test_a_batch_that_fails_is_halved() -> None:
    reports: list[BatchReport] = []
    engine = FakeEngine(lambda each: each.input_ids[0] == 9)
    made = SteppedScheduler(engine, LIMITS)
    made._on_batch = reports.append
    futures = [submit(made, [sized(4, value)], later()) for value in (1, 9, 2, 3, 4)]
    (worker, _) = made.workers
    made.look(worker)
    assert len(worker.batch) == 5
    made.run(worker)
    assert [[each.input_ids[0] for each in batch] for batch in engine.batches] == [[1], [2, 3, 4]]
    assert [(report.sequences, report.fill) for report in reports] == [
        (1, BatchFill.ERROR), (3, BatchFill.ERROR),
    ]  # fmt: skip
    error = futures[1].exception(0)
    assert type(error) is errors.EngineFailed
    assert [future.result(0).outputs[0]["embedding"].array[0] for future in futures[2:]] == [
        8, 12, 16,
    ]  # fmt: skip
    assert made.dead_reason is None


class WithoutItsAdapter(FakeEngine):
    """An engine whose adapters cannot be read, which says nothing of the engine itself."""

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        if any(each.adapter for each in batch):
            raise errors.AdapterUnavailable("the files of the adapter stars have changed")
        return super().run(batch, alone=alone)


def test_an_adapter_that_cannot_be_read_fails_its_requests_alone() -> None:
    engine = WithoutItsAdapter()
    engine.broken = True  # so a probe would end it
    made = SteppedScheduler(engine, LIMITS)
    adapted = replace(sized(4), adapter="stars@1")
    futures = [submit(made, [each], later()) for each in (sized(4), adapted, sized(4, 2))]
    (worker, _) = made.workers
    made.look(worker)
    made.run(worker)
    error = futures[1].exception(0)
    assert type(error) is errors.AdapterUnavailable, "its status is 503, not 500"
    assert [futures[n].result(0).outputs[0]["embedding"].array[0] for n in (0, 2)] == [4, 8]
    assert made.dead_reason is None


def test_a_lone_batch_is_told() -> None:
    engine, activity = Recording(), Activity()
    with running(engine, LIMITS, activity=activity) as made:
        conditions: Any = (made._changed, made._short_texts)
        wait_until(lambda: all(condition._waiters for condition in conditions))
        submit(made, [sized(5)], later()).result(20)
        engine.gate.clear()
        engine.entered.clear()
        submit(made, [sized(5)], later())
        engine.entered.wait(20)
        rest = [submit(made, [sized(length)], later()) for length in (6, 7)]
        engine.gate.set()
        rest[1].result(20)
        assert engine.alone == [True, True, False, True]
        wait_until(lambda: activity.busy == 0)
        submit(made, [sized(5)], later(), is_bulk=True).result(20)
        assert not engine.alone[-1], "a bulk batch leaves cores to the next request"
        wait_until(lambda: activity.busy == 0)
        activity.busy += 1  # a worker of another model
        submit(made, [sized(5)], later()).result(20)
        assert not engine.alone[-1]
    assert activity.busy == 1
    base = os.getpriority(os.PRIO_PROCESS, 0)
    expected = 4 if base <= 4 or os.geteuid() == 0 else base
    assert set(engine.nice) == {expected}, "workers yield to the event loop"


@pytest.mark.parametrize(
    ("rate", "latency_s", "expected"),
    [
        (1000.0, 0.0, 2000), (1000.0, 0.01, 128), (1000.0, 3.0, 2000), (1000.0, 0.2999, 299),
    ],
)  # fmt: skip
def test_a_batch_has_what_runs_within_the_latency(
    rate: float, latency_s: float, expected: int
) -> None:
    for most, tokens in ((2000, expected), (100, 100)):
        made = stepped(max_batch_tokens=most, batch_latency_s=latency_s)
        assert made._batch_tokens == most
        submit(made, [sized(1)], later())
        made.look(made.workers[0])
        made._deliver(made.workers[0].batch, [{}], 1 / rate)
        assert made._batch_tokens == tokens


def test_a_request_whose_time_is_over_is_told() -> None:
    made = stepped()
    (worker, _) = made.workers
    over, slow = submit(made, [sized(5)], later()), submit(made, [sized(10), sized(10)], later())
    for request, left_s in ((over, -1), (slow, 0.54)):
        request.terms = request.terms._replace(deadline=later(left_s))
    submit(made, [sized(7)], later())
    made._admission.tokens_per_s = 1.0
    while not slow.done():
        made.look(worker)
        worker.batch = []
    ends = [future.exception(0) for future in (over, slow)]
    assert [type(error) for error in ends] == [errors.DeadlineExceeded] * 2
    assert "was over before it ran" in str(ends[0])
    assert "the workers have become slower" in str(ends[1])


def test_a_full_queue_admits_all_or_none_and_a_later_round_and_an_empty_one_always() -> None:
    made = stepped(max_queue_tokens=60)
    first = submit(made, [sized(10), sized(20)], later())
    with refused("overloaded"):
        submit(made, [sized(1), sized(30)], later())
    assert made.state.tokens == 30
    submit(made, [sized(50)], later(), later_round=True)
    assert made.state.tokens == 80
    first.cancel()
    assert made.state.tokens == 50, "cancelled work frees the queue at once"
    empty = stepped(max_queue_tokens=10, waits=WaitLimits(0.001))
    empty._admission.tokens_per_s = 1.0
    submit(empty, [sized(1000)], later(0.0))
    with pytest.raises(errors.Overloaded):
        submit(empty, [sized(1)], later())


def test_requests_are_counted_by_client_until_they_end() -> None:
    made = stepped()
    futures = [submit(made, [sized(5)], later(), client=client) for client in "aab"]
    bulk = submit(made, [sized(5)], later(), client="c", is_bulk=True)
    assert made._activity.requests == {"a": 2, "b": 1}
    bulk.cancel()
    assert made.expected_wait("a", LineKey(0, 0), 5).requests == 2
    for future in futures:
        future.cancel()
    assert made.expected_wait("a", LineKey(0, 0), 5) == ExpectedWait(0.0, 0.0, 0)
    assert not made._activity.requests, "nothing is kept of clients without requests"


def test_close_fails_what_waits_and_does_not_wait_for_ever() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    made = Scheduler(engine, LIMITS)
    made.start()
    runs, waits = submit(made, [sized(5)], later()), None
    engine.entered.wait(20)
    waits = submit(made, [sized(6)], later())
    begin = time.monotonic()
    made.close(0.1)
    assert 0.1 <= time.monotonic() - begin < 4
    for future in (runs, waits):
        error = future.exception(0)
        assert type(error) is errors.ShuttingDown
    assert alive(made) == ["worker-0"]
    engine.gate.set()
    made.close()
    assert alive(made) == []
    assert made.dead_reason is None
    for later_round in (False, True):
        with refused("shutting_down"):
            submit(made, [sized(5)], later(), later_round=later_round)


def test_a_dead_engine_fails_everything_and_its_threads_end() -> None:
    deaths: list[str] = []
    engine = FakeEngine(lambda _: True)
    engine.broken = True
    with running(engine, LIMITS, on_dead=deaths.append) as made:
        engine.gate.clear()
        first = submit(made, [sized(5)], later())
        engine.entered.wait(20)
        second = submit(made, [sized(6)], later())
        engine.gate.set()
        assert type(first.exception(20)) is errors.EngineFailed
        reason = "after an error it could not repeat its golden outputs (RuntimeError)"
        assert str(second.exception(20)) == f"the engine is dead: {reason}"
        assert type(second.exception(20)) is errors.EngineDead
        wait_until(lambda: alive(made) == [])
        assert deaths == [reason]
        assert made.dead_reason == reason
        with refused("engine_dead"):
            submit(made, [sized(5)], later())
    assert deaths == [reason]


class Ticks(VirtualClock):
    """A clock whose waits for an event take the given times, one after another."""

    def __init__(self, *steps: float) -> None:
        super().__init__()
        self._steps = iter(steps)
        self.periods: list[float] = []

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.periods.append(seconds)
        step = next(self._steps, None)
        if step is None:
            return True
        self.now += step
        return event.is_set()


def hung(predicted_s: float | None, *steps: float) -> list[str]:
    reasons: list[str] = []
    ticks = Ticks(*steps)
    dog = Watchdog(8.0, reasons.append, ticks)
    with dog.run(3, predicted_s):
        assert set(dog._runs) == {3}
        dog.watch()
    assert set(ticks.periods) == {2.0}
    return reasons


def test_a_run_may_take_ten_times_its_prediction_and_the_margin() -> None:
    # 10 x 0.2 s + 8 s: five periods pass, and one more shows that nothing is left.
    assert hung(0.2, *[2.0] * 5) == []
    assert hung(0.2, *[2.0] * 6) == ["a run took longer than 10.0 s"]
    assert hung(None, *[2.0] * 34) == []
    assert hung(None, *[2.0] * 35) == ["a run took longer than 68.0 s"]
    # Time in which the process was stopped does not count.
    assert hung(0.2, 1000.0, *[2.0] * 4) == []
    assert len(hung(0.2, 1000.0, *[2.0] * 5)) == 1
