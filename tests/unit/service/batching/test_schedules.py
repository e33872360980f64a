"""Every order of a few steps of clients and workers, made by one thread: invariants after each."""

from collections.abc import Iterator, Sequence

import pytest

from cloze.service.errors import DeadlineExceeded, EngineDead, EngineFailed, ShuttingDown
from tests.support.schedule import CANCELLED, RESULT, Case, Request, Schedule, Step

SHORT: Sequence[Request] = (("a", (4, 6)), ("b", (4,)), ("a", (4,)))
LONG_FIRST: Sequence[Request] = (("a", (20,)), ("b", (4, 6)), ("a", (20,)))
CASES = {
    "new-workers": Case(True, 2, SHORT, (), depth=5),
    "workers-wait": Case(True, 2, SHORT, (("look", 0), ("look", 1)), depth=5),
    "equal-lengths": Case(False, 2, SHORT, (("look", 0), ("look", 1), ("look", 2)), depth=5),
    "a-mixed-batch": Case(True, 1, SHORT, (("submit", 0), ("submit", 1), ("look", 0)), depth=4),
    "two-batches": Case(
        False, 2, SHORT, (("submit", 0), ("submit", 1), ("look", 0), ("look", 1)), depth=4
    ),
    "a-long-text-runs": Case(
        False, 1, LONG_FIRST, (("look", 1), ("submit", 0), ("look", 0)), depth=5
    ),
}
OUTCOMES = {RESULT, CANCELLED, DeadlineExceeded, EngineDead, EngineFailed, ShuttingDown}


def all_orders(case: Case, depth: int) -> Iterator[Schedule]:
    """Yield every order of so many steps, after the steps that finish it."""
    choices: list[int] = []
    while True:
        schedule = Schedule(case)
        try:
            sizes = make_order(schedule, case.start, depth, choices)
        except BaseException as error:
            error.add_note(f"the steps: {schedule.steps}")
            raise
        yield schedule
        choices += [0] * (len(sizes) - len(choices))
        while choices and choices[-1] + 1 == sizes[len(choices) - 1]:
            choices.pop()
        if not choices:
            return
        choices[-1] += 1


def make_order(
    schedule: Schedule, start: Sequence[Step], depth: int, choices: Sequence[int]
) -> list[int]:
    """Make one order of steps: the chosen ones, then the first possible ones.

    Returns:
        The number of possible steps at each choice.
    """
    for step in start:
        schedule.make(step)
    sizes = []
    for place in range(depth):
        if not (steps := list(schedule.possible())):
            break
        sizes.append(len(steps))
        schedule.make(steps[choices[place] if place < len(choices) else 0])
    schedule.finish()
    return sizes


LONG = ("two-batches", "a-long-text-runs")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name in LONG else [])
        for name, case in CASES.items()
    ],
)
def test_every_order_of_steps_ends_each_request_once(case: Case) -> None:
    orders = all_orders(case, case.depth)
    assert {request.outcome for schedule in orders for request in schedule.requests} >= OUTCOMES
