"""The parameters of long texts, and the limits of all texts."""

import pytest

from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.texts import TruncationParameters
from cloze.service.tasks.wire import check_range
from tests.support.refusals import refused
from tests.support.task_model import LIMITS


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, "truncate"),
        ({"truncate": True}, "truncate"),
        ({"truncate": False}, "error"),
        ({"long_text": "error", "truncate": False}, "error"),
        ({"long_text": "truncate", "truncate": True}, "truncate"),
    ],
)
def test_the_choice_for_a_long_text(fields: dict, choice: str) -> None:
    assert TruncationParameters(**fields).rule().choice == choice


def test_one_input_or_a_list() -> None:
    assert LIMITS.checked("a" * 200) == [(INPUTS, "a" * 200)]
    assert LIMITS.checked([5, 6]) == [(INPUTS, [5, 6])]  # the token ids of one text
    assert LIMITS.checked(["a"] * 4) == [(INPUTS.below(index), "a") for index in range(4)]
    assert str(LIMITS.checked([[5], [6]])[1][0]) == "inputs[1]"
    with refused("text_too_long", 201, 200, at="inputs"):
        LIMITS.checked("a" * 201, INPUTS)


def test_limits_are_inclusive() -> None:
    LIMITS.check_results(60, "the texts need")
    with refused("limit_exceeded", 61, 60):
        LIMITS.check_results(61, "the texts need")
    check_range(2, 2, 4, "top_k")
    check_range(4, 2, 4, "top_k")
    for value in (1, 5):
        with refused("invalid_value", 2, 4, value, at="top_k"):
            check_range(value, 2, 4, "top_k")
