"""Costs, rates and limits of time in the batching, with a clock by hand."""

import math
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads import HEADS
from cloze.service.batching import watchdog
from cloze.service.batching.admission import Admission
from cloze.service.batching.cost import (
    BatchCostModel,
    _fit,
    _largest_runnable,
    largest_batch,
    measure_cost,
)
from cloze.service.batching.fair_queue import FairQueue
from cloze.service.batching.lines import LineKey
from cloze.service.batching.measures import Activity, Demand, DrainRate
from cloze.service.batching.watchdog import Watchdog
from cloze.service.core import (
    MAX_BATCH_VOCABULARY_ROWS,
    MAX_PADDING_FACTOR,
    Submission,
)
from tests.test_scheduler import later, sized


def test_the_limit_of_a_batch_makes_its_fixed_part_small() -> None:
    # 19 x 10 ms is the time in which 10 ms are a twentieth; a token takes 10 us + 128 x 0.01 us.
    model = BatchCostModel(0.01, 1e-5, 1e-8)
    assert model.batch_tokens(10.0) == 16384
    assert BatchCostModel(0.001, 1e-5, 1e-8).batch_tokens(10.0) == int(0.019 / 1.128e-5)
    assert BatchCostModel(0.01, 1e-5, 1e-8).batch_tokens(0.05) == int(0.04 / 1.128e-5)
    assert BatchCostModel(0.01, 1e-5, 1e-8).batch_tokens(0.011) == 512
    assert BatchCostModel(0.01, 1e-5, 1e-8, 1024).batch_tokens(10.0) == 1024
    assert BatchCostModel(0.01, 1e-5, 1e-8, 256).batch_tokens(0.011) == 256


def test_only_a_fixed_part() -> None:
    assert BatchCostModel(0.01, 0.0, 0.0).batch_tokens(0.01) == 16384
    assert BatchCostModel(0.01, 0.0, 0.0).batch_tokens(0.009) == 512
    assert BatchCostModel(0.01, 0.0, 0.0, 256).batch_tokens(0.009) == 256


def test_a_cost_model_shows_its_units() -> None:
    shown = str(BatchCostModel(0.0015, 2e-6, 3e-9, 512))
    assert shown.startswith("one takes 1.50 ms and 2000 ns per token, 3.00 ns per pair")
    assert shown.endswith("up to 512 tokens ran")


def test_a_fit_finds_the_coefficients_and_none_below_zero() -> None:
    rows = np.array([(1.0, t, t * n) for t in (512, 1024, 4096) for n in (32, 128)])
    assert _fit(rows, rows @ [0.002, 1e-5, 1e-8]) == pytest.approx([0.002, 1e-5, 1e-8], rel=1e-6)
    fixed, per_token, per_square = _fit(rows, rows @ [0.002, 1e-5, -1e-9])
    assert per_square == 0
    assert fixed > 0
    assert per_token > 0


@pytest.mark.parametrize(
    ("true", "noise", "fitted"),
    [
        (
            [0.004603013, 3.848e-06, 2.8e-07],
            [1.11, 0.7, 1.15, 1.03, 1.03, 0.87],
            [0.0041902288, 8.498041468e-06, 1.8819605674e-07],
        ),
        (
            [-0.001653088, 1.5136e-05, -3.5e-08],
            [1.11, 1.27, 1.07, 0.7, 0.96, 0.93],
            [8.40946677406744e-05, 9.106957005390182e-06, 0.0],
        ),
    ],
)
def test_a_fit_minimises_relative_errors(
    true: list[float], noise: list[float], fitted: list[float]
) -> None:
    """The second fit leaves out the coefficient that is the furthest below zero for its column."""
    rows = np.array([(1.0, t, t * n) for t in (512, 1024, 4096) for n in (32, 128)])
    assert _fit(rows, rows @ true * noise) == pytest.approx(fitted, rel=1e-6)


class Clocked:
    """An engine whose batches take a known time, and that fails above a number of tokens."""

    def __init__(self, most: int = 10**9) -> None:
        self.now, self.most = 0.0, most
        self.batches: list[list[int]] = []
        self.runs = 0

    def run(self, batch: Any) -> None:
        lengths = [len(encoding) for encoding in batch]
        if sum(lengths) > self.most:
            raise RuntimeError("no memory\nfor it")
        self.batches.append(lengths)
        self.runs += 1
        slow = 5.0 if self.runs % 4 == 2 else 0.0  # the warm-up, and noise that the fastest avoids
        self.now += 0.002 + 1e-5 * sum(lengths) + 1e-8 * sum(n * n for n in lengths) + slow


def test_costs_are_measured_by_the_fastest_run() -> None:
    engine: Any = Clocked()
    model = measure_cost(engine, [HEADS["embedding"]], 512, lambda: engine.now)
    assert (model.fixed, model.per_token, model.per_square) == pytest.approx(
        (0.002, 1e-5, 1e-8), rel=1e-3
    )
    assert model.max_tokens == 16384
    assert max(engine.batches[0]) == 512, "the largest batch runs first"
    assert {max(batch) for batch in engine.batches[1:]} == {32, 128, 512}
    assert len(engine.batches) == 1 + 3 * 6 * 4


def test_no_length_is_measured_beyond_the_model() -> None:
    engine: Any = Clocked(most=1100)
    model = measure_cost(engine, [HEADS["embedding"]], 100, lambda: engine.now)
    assert {max(batch) for batch in engine.batches[1:]} == {32, 100}
    assert {sum(batch) for batch in engine.batches[1:]} == {512, 1024, 500, 1000}
    assert model.max_tokens == 1024


def test_a_size_that_does_not_run_is_halved(caplog: pytest.LogCaptureFixture) -> None:
    engine: Any = Clocked(most=3000)
    assert _largest_runnable(engine, [HEADS["embedding"]], 128) == 2048
    assert "a batch of 4096 tokens does not run; trying half of it: no memory" in caplog.text
    assert "for it" not in caplog.text
    nothing: Any = Clocked(most=10)
    with pytest.raises(RuntimeError, match="no memory"):
        _largest_runnable(nothing, [HEADS["embedding"]], 128)


def test_the_largest_batch_has_all_that_needs_memory() -> None:
    heads = [HEADS["embedding"], HEADS["masked_lm"]]
    batch = largest_batch(heads, 128, 2048)
    lengths = [len(encoding) for encoding in batch]
    assert lengths[0] == 128
    assert sum(lengths) == 2048
    assert len(batch) == MAX_PADDING_FACTOR * 2048 // 128
    assert max(lengths[1:]) - min(lengths[1:]) <= 1
    assert batch[0].vocabulary_rows == MAX_BATCH_VOCABULARY_ROWS
    assert all(encoding.vocabulary_rows == 0 for encoding in batch[1:])
    assert all(list(encoding.requests) == ["embedding"] for encoding in batch[1:])
    assert [len(e) for e in largest_batch(heads, 4096, 2048)] == [4096]


# ---- the rate ----------------------------------------------------------------------------------


def test_a_rate_is_measured_while_others_wait() -> None:
    rate = DrainRate()
    rate.batch_ended(0.0, 999, waiting=True)  # began before the window
    rate.batch_ended(0.1, 100, waiting=True)
    assert rate.per_s == 0, "the window is too short"
    rate.batch_ended(0.25, 100, waiting=True)
    assert rate.per_s == 800
    rate.batch_ended(0.75, 50, waiting=True)
    assert rate.per_s == pytest.approx(800 + 0.3 * (100 - 800))


def test_an_idle_queue_has_no_rate() -> None:
    rate = DrainRate()
    rate.batch_ended(0.0, 10, waiting=True)
    rate.batch_ended(0.2, 10, waiting=False)
    rate.batch_ended(5.0, 10, waiting=True)
    rate.batch_ended(5.5, 100, waiting=False)
    assert rate.per_s == 200
    rate.batch_ended(6.5, 100, waiting=False)
    assert rate.per_s == 200


def test_a_window_of_more_than_ten_seconds_is_dropped() -> None:
    rate = DrainRate()
    rate.batch_ended(0.0, 10, waiting=True)
    rate.batch_ended(10.0, 100, waiting=True)
    assert rate.per_s == 10
    rate.batch_ended(20.1, 1000, waiting=True)
    assert rate.per_s == 10
    rate.batch_ended(21.1, 100, waiting=True)
    assert rate.per_s == pytest.approx(10 + 0.3 * 90)


def test_the_rate_falls_while_more_workers_are_busy_than_were_measured() -> None:
    rate = DrainRate()
    rate.batch_ended(0.0, 10, busy=8, waiting=True)  # began before the window
    rate.batch_ended(0.2, 25, busy=1, waiting=True)
    rate.batch_ended(0.5, 75, busy=3, waiting=True)
    assert rate.per_s == 200, "with 2.5 busy workers in the mean of the tokens"
    assert rate.among(5) == 100
    assert rate.among(1) == rate.among(0) == 200, "the others may have had cores of their own"
    rate.batch_ended(1.0, 100, busy=5, waiting=True)
    assert rate.among(5) == pytest.approx(200 * (2.5 + 0.3 * 2.5) / 5)


def test_a_model_that_begins_to_work_slows_the_others_at_once() -> None:
    activity, queue = Activity(), FairQueue(varlen=False, max_dropped_tokens=100)
    admission = Admission(queue, activity, 1, 1000, 10.0)
    queue.add(Submission(later(), [sized(100)]), LineKey(0, 0))
    activity.begin()
    admission.batch_ended(10, 10.0)
    time.sleep(0.25)
    admission.batch_ended(1000, 10.0)
    alone = admission.rate
    assert alone > 100, "measured while others waited"
    activity.begin()
    assert admission.rate == pytest.approx(alone / 2)
    activity.end()
    assert admission.rate == alone


def test_the_busy_workers_are_counted() -> None:
    activity = Activity()
    assert activity.busy == 0
    activity.begin()
    activity.begin()
    assert activity.busy == 2
    activity.end()
    assert activity.busy == 1


# ---- the watchdog ------------------------------------------------------------------------------


class Ticks:
    """Ends the waits of `Watchdog.watch` at once; each moves the clock."""

    def __init__(self, dog: Watchdog, monkeypatch: pytest.MonkeyPatch, *steps: float) -> None:
        self.now, self._steps, self._dog = 0.0, iter(steps), dog
        self.periods: list[float] = []
        self.during: Any = lambda: None
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(dog._ended, "wait", self.wait)

    def wait(self, period_s: float) -> bool:
        self.periods.append(period_s)
        step = next(self._steps, None)
        if step is None:
            return True
        self.now += step
        return False


def hung(monkeypatch: pytest.MonkeyPatch, predicted_s: float | None, *steps: float) -> list[str]:
    reasons: list[str] = []
    dog = Watchdog(8.0, reasons.append)
    dog.began(3, predicted_s)
    assert dog.busy == {3}
    ticks = Ticks(dog, monkeypatch, *steps)
    dog.watch()
    assert set(ticks.periods) == {2.0}
    return reasons


def test_a_run_may_take_ten_times_its_prediction_and_the_margin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 10 x 0.2 s + 8 s: five periods pass, and one more shows that nothing is left.
    assert hung(monkeypatch, 0.2, *[2.0] * 5) == []
    assert hung(monkeypatch, 0.2, *[2.0] * 6) == ["a run took longer than 10.0 s"]
    assert hung(monkeypatch, None, *[2.0] * 34) == []
    assert hung(monkeypatch, None, *[2.0] * 35) == ["a run took longer than 68.0 s"]


def test_time_in_which_the_process_was_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert hung(monkeypatch, 0.2, 1000.0, 2.0, 2.0) == []
    assert len(hung(monkeypatch, 0.2, 1000.0, 2.0, 2.0, 2.0, 2.0)) == 1


def test_a_run_that_ended_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []
    dog = Watchdog(8.0, reasons.append)
    dog.began(1, 0.2)
    dog.finished(1)
    dog.finished(1)
    assert dog.busy == set()
    Ticks(dog, monkeypatch, *[2.0] * 20)
    dog.watch()
    assert reasons == []


def test_a_watch_ends() -> None:
    dog = Watchdog(1000.0, lambda _: None)
    thread = threading.Thread(target=dog.watch)
    thread.start()
    dog.end()
    thread.join(20)
    assert not thread.is_alive()


# ---- demand -------------------------------------------------------------------------------------


def test_without_work_there_is_no_bound() -> None:
    demand = Demand()
    assert demand.slack_s(0.0, 10.0) == math.inf
    demand.add(math.inf, 1000)
    assert demand.slack_s(0.0, 10.0) == math.inf
    assert demand.slack_s(0.0, 10.0, math.inf, 1000) == math.inf
    assert demand.slack_s(0.0, 10.0, 5.0, 0) == math.inf


def test_slack_is_the_time_until_the_first_due_less_the_work() -> None:
    demand = Demand()
    demand.add(10.05, 20)
    assert demand.slack_s(3.0, 10.0) == pytest.approx(5.0), "dues are rounded down to 0.1 s"
    assert demand.slack_s(9.0, 10.0) == pytest.approx(-1.0)
    demand.add(50.0, 1000)
    assert demand.slack_s(3.0, 10.0) == pytest.approx(-55.0), "50 - 3 - 102"
    demand.add(50.0, -1000)
    assert demand.slack_s(3.0, 10.0) == pytest.approx(5.0)
    demand.add(10.05, -5)
    assert demand.slack_s(3.0, 10.0) == pytest.approx(5.5)


def test_work_that_is_gone_bounds_nothing() -> None:
    demand = Demand()
    demand.add(50.0, 10)
    demand.add(1.0, 10)
    demand.add(30.0, 10)
    demand.add(1.0, -10)
    assert demand.slack_s(0.0, 20.0) == pytest.approx(29.0), "a lower bound: 30 - 20 / 20"
    demand.add(30.0, -10)
    assert demand.slack_s(0.0, 20.0) == pytest.approx(49.5)
    demand.add(50.0, -10)
    assert demand.slack_s(0.0, 20.0) == math.inf


def test_further_work_counts_from_its_due_on() -> None:
    demand = Demand()
    demand.add(10.0, 60)
    demand.add(20.0, 60)
    assert demand.slack_s(0.0, 10.0, 15.0, 20) == pytest.approx(6.0 - 10 + 10, abs=4.1)
    # 20 of 15 s: 8 s of work until then, and 14 s until 20 s.
    assert demand.slack_s(3.0, 10.0, 15.0, 20) == pytest.approx(3.0)
    # Before all: 12 s of work until 20 s leave 5 s; 7 s until 10 s leave 0 s.
    assert demand.slack_s(3.0, 10.0, 5.0, 10) == pytest.approx(0.0)
    assert demand.slack_s(4.0, 10.0, 10.0, 10) == pytest.approx(-1.0)
    assert demand.slack_s(9.0, 10.0, 30.0, 10) == pytest.approx(8.0), "those before are not asked"
    assert demand.slack_s(9.0, 10.0) == pytest.approx(-5.0)


def test_slack_is_the_least_over_all_dues() -> None:
    """Compare with the definition, for random work."""
    generator = random.Random(5)
    for _ in range(300):
        demand, work = Demand(), []
        for _ in range(generator.randrange(6)):
            due, tokens = generator.randrange(1, 12), generator.randrange(1, 40)
            demand.add(due + 0.05, tokens)
            work.append((due, tokens))
        now, rate = generator.uniform(0, 10), generator.uniform(1, 20)
        own_due, own = generator.randrange(1, 12), generator.choice([0, 0, 7])
        every = work + [(own_due, own)] * bool(own)
        least = own_due if own else 0
        exact = min(
            (
                due - now - sum(tokens for other, tokens in every if other <= due) / rate
                for due, _ in every
                if due >= least
            ),
            default=math.inf,
        )
        found = demand.slack_s(now, rate, own_due + 0.05, own)
        assert found == pytest.approx(exact) or 0 < found < exact, "exact, or a bound above zero"
        if exact <= 0:
            assert found == pytest.approx(exact)
