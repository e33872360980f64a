"""The study of admission in a small form: the order of the policies on which decision 17 rests."""

from collections.abc import Sequence

import numpy as np
import pytest

from cloze.bench.load import poisson
from cloze.bench.studies.admission import (
    CODEL,
    CONTROLLED,
    LIFO,
    NO_LIMIT,
    OURS,
    TOKENS,
    Figures,
    Policy,
    ServiceModel,
    capacity,
    closed_loop,
    figures,
    open_loop,
    recorded,
)
from cloze.bench.studies.admission_queues import Fate
from cloze.bench.studies.tail import text_lengths
from cloze.bench.studies.virtual_time import ALONE, COSTS

MODEL = ServiceModel(COSTS["int8"], ALONE["int8"])
LENGTHS = text_lengths("passages", 2000)
SECONDS = 10.0


@pytest.fixture(scope="module")
def rate() -> float:
    return capacity(MODEL, LENGTHS, SECONDS)


def at(policy: Policy, times: Sequence[float]) -> Figures:
    return figures(open_loop(policy, MODEL, times, LENGTHS), SECONDS)


def test_an_overload_costs_our_answers_little_and_those_of_a_long_queue_most(rate: float) -> None:
    times = poisson(5 * rate, SECONDS).tolist()
    ours = at(OURS, times)
    assert ours.good_per_s > 0.9 * rate
    assert ours.late == ours.dropped == 0, "what was admitted is answered in time"
    for policy in (TOKENS, NO_LIMIT):
        long_queue = at(policy, times)
        assert long_queue.good_per_s < 0.6 * rate
        assert long_queue.late > 0.7
    controlled, lifo = at(CONTROLLED, times), at(LIFO, times)
    assert controlled.good_per_s > 0.9 * rate
    assert controlled.p50_s < ours.p50_s / 10, "what controlled delay answers, it answers sooner"
    assert controlled.dropped > 0.7, "and it drops the others after it has accepted them"
    assert lifo.good_per_s > 0.9 * rate
    assert lifo.late + lifo.dropped > 0.7
    assert at(CODEL, times).good_per_s < 0.8 * ours.good_per_s, "clients do not slow down"


def test_short_bursts_are_answered(rate: float) -> None:
    times = recorded(np.array([0.0, 1.0, 1.8, 3.0, 3.8]), 0.9 * rate, SECONDS)
    ours, controlled = at(OURS, times), at(CONTROLLED, times)
    assert ours.refused + ours.late < 0.02 < 0.05 < controlled.dropped
    assert ours.good_per_s > controlled.good_per_s


@pytest.mark.parametrize("policy", [OURS, TOKENS, CONTROLLED, LIFO], ids=lambda policy: policy.name)
def test_only_fair_shares_protect_a_light_client(policy: Policy) -> None:
    def answers(connections: dict[str, int]) -> int:
        requests = closed_loop(policy, MODEL, connections, LENGTHS, SECONDS)
        return sum(
            request.client == "light" and request.fate is Fate.ANSWERED for request in requests
        )

    share = answers({"light": 1, "heavy": 200}) / answers({"light": 1})
    assert share > 0.3 if policy is OURS else share < 0.1


def test_recorded_arrivals_keep_their_rate_and_their_bursts() -> None:
    times = np.array(recorded(np.array([0.0, 1.0, 1.1, 2.0]), rate=3000, seconds=10.0))
    assert abs(len(times) - 30_000) < 6 * np.sqrt(30_000)
    in_burst = ((times > 5.0) & (times < 5.5)).sum()
    assert in_burst == pytest.approx(10_000, rel=0.05)
    assert 0 <= times.min() <= times.max() <= 10
