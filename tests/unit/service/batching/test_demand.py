"""The slack of the demand: how long other work may run, and all that waits still ends in time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloze.service.batching.fair_queue import Demand

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
