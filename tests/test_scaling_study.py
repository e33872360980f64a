"""The simulated autoscaler: what the documented rule gives, and what each of its halves lacks."""

import numpy as np
import pytest

from cloze.bench.studies.scaling import (
    CAPACITY,
    Autoscaler,
    Outcome,
    Replica,
    Rule,
    _one_busy,
    by_all,
    by_backlog,
    by_both,
    by_latency,
    by_mean_backlog,
    by_processor,
    ramp,
    simulate,
)


def slowly(rule: Rule) -> Outcome:
    return simulate(ramp(CAPACITY, 6 * CAPACITY, 10), rule, (1.0,))


def quickly(rule: Rule) -> Outcome:
    return simulate(ramp(CAPACITY, 6 * CAPACITY, 1), rule, (1.0,))


def test_the_processor_is_busy_before_anybody_waits() -> None:
    assert slowly(by_processor).refused == 0
    late = slowly(by_backlog)
    assert late.refused > 0
    assert late.first_late_s is not None
    assert late.first_more_s is not None
    assert late.first_late_s < late.first_more_s, "a backlog alone asks too late"


def test_a_burst_needs_the_backlog() -> None:
    """The use of the processor ends at 1, so it asks for 1.4 times the replicas at most."""
    assert quickly(by_both).good > 1.05 * quickly(by_processor).good


def test_latency_asks_last_and_adds_nothing() -> None:
    latency, both = quickly(by_latency), quickly(by_both)
    assert latency.first_more_s is not None
    assert both.first_more_s is not None
    assert latency.first_more_s > both.first_more_s
    assert latency.good < 0.95 * both.good
    assert quickly(by_all).good == pytest.approx(both.good, rel=0.01)


def test_a_mean_over_models_hides_the_busy_one() -> None:
    rates = np.full(6000, 2.05 * CAPACITY)
    mean, largest = _one_busy(rates, by_mean_backlog), _one_busy(rates, by_backlog)
    assert largest.first_more_s is not None
    assert mean.first_more_s is not None
    assert largest.first_more_s < mean.first_more_s
    assert largest.good > mean.good


def test_nothing_is_lost_in_the_reckoning() -> None:
    outcome = quickly(by_both)
    assert 0 < outcome.refused < outcome.offered
    assert outcome.good + outcome.refused <= outcome.offered * (1 + 1e-9)


def test_the_autoscaler_doubles_at_most_and_shrinks_slowly() -> None:
    scaler = Autoscaler(by_processor, 2)
    assert scaler.sync(0.0, Replica(1.0, (0.0,)))
    assert scaler.replicas == 3
    assert scaler.running(29.0) == 2
    assert scaler.running(31.0) == 3
    eager = Autoscaler(lambda _: 9.0, 2)
    assert eager.sync(0.0, Replica(1.0, (1.0,)))
    assert eager.replicas == 4
    for second in range(45, 300, 15):
        scaler.sync(float(second), Replica(0.0, (0.0,)))
        assert scaler.replicas == 3, "five minutes ago, three were wanted"
    for second in range(300, 600, 15):
        scaler.sync(float(second), Replica(0.0, (0.0,)))
    assert scaler.replicas == 2


@pytest.mark.parametrize("use", [0.64, 0.7, 0.76])
def test_small_differences_change_nothing(use: float) -> None:
    scaler = Autoscaler(by_processor, 4)
    assert not scaler.sync(0.0, Replica(use, (0.0,)))
    assert scaler.replicas == 4
