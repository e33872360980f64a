"""Windows of long texts, and what is to happen to a text that is too long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloze.service.core import EmptyRequest, InvalidRequest, Location
from cloze.service.tasks.task import (
    INPUTS,
    check_range,
)
from cloze.service.tasks.texts import (
    LongTextRule,
    TextEncoder,
    TruncationParameters,
    characters,
)
from tests.unit.service.tasks.model import CONTEXT, LIMITS, limited

WIDE = limited(max_request_tokens=10_000)


def divided(tokens: int, room: int, stride: int | None) -> list[tuple[int, int]]:
    return TextEncoder(LongTextRule("window"), WIDE, 12).divide(tokens, room, INPUTS, stride)


def test_windows_overlap_by_the_stride_and_end_with_the_text() -> None:
    assert divided(10, 4, 1) == [(0, 4), (3, 7), (6, 10)]
    assert divided(11, 4, 1) == [(0, 4), (3, 7), (6, 10), (9, 11)]
    assert divided(4, 4, 3) == [(0, 4)]
    assert divided(5, 4, 0) == [(0, 4), (4, 5)]
    assert divided(2, 4, 1) == [(0, 2)]


@given(st.integers(0, 60), st.integers(1, 12), st.data())
def test_windows_are_as_many_as_the_text_needs(tokens: int, size: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(0, size - 1))
    expected = [(0, min(size, tokens))]
    while expected[-1][1] < tokens:
        first = expected[-1][0] + size - stride
        expected.append((first, min(first + size, tokens)))
    assert divided(tokens, size, stride) == expected


def test_an_encoder_counts_whole_windows_with_their_special_tokens() -> None:
    encoder = TextEncoder(LongTextRule("window"), CONTEXT, 12)  # 400 tokens per request
    assert encoder.divide(20, 8, INPUTS) == [(0, 8), (6, 14), (12, 20)]  # 3 windows x 10
    assert encoder.divide(8, 8, INPUTS, stride=0) == [(0, 8)]  # 40 tokens so far
    encoder.divide(36 * 8, 8, INPUTS, stride=0)  # 360 more: the limit itself
    last = Location(("last",))
    with pytest.raises(InvalidRequest, match=r"up to last .* hold 410 tokens; .* is 400"):
        encoder.divide(1, 8, last)


def test_characters_of_windows() -> None:
    assert characters([(0, 2), (1, 3)], [(0, 3), (4, 6), (7, 12)]) == [(0, 6), (4, 12)]


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, "truncate"),
        ({"truncate": True}, "truncate"),
        ({"truncate": False}, "error"),
        ({"long_text": "error"}, "error"),
        ({"long_text": "truncate"}, "truncate"),
        ({"long_text": "error", "truncate": False}, "error"),
        ({"long_text": "truncate", "truncate": True}, "truncate"),
    ],
)
def test_the_choice_for_a_long_text(fields: dict, choice: str) -> None:
    assert TruncationParameters(**fields).rule().choice == choice


@pytest.mark.parametrize(("truncate", "long_text"), [(True, "error"), (False, "truncate")])
def test_contradicting_parameters_are_refused(truncate: bool, long_text: str) -> None:
    parameters = TruncationParameters(truncate=truncate, long_text=long_text)
    with pytest.raises(InvalidRequest, match=f"truncate {str(truncate).lower()} contradicts"):
        _ = parameters.rule().choice


def test_a_cut_is_refused_by_the_parameter_that_forbids_it() -> None:
    TruncationParameters().rule().check(INPUTS, 14, 12)
    with pytest.raises(InvalidRequest, match="inputs has 14 tokens; the model reads 12, and trunc"):
        TruncationParameters(truncate=False).rule().check(INPUTS, 14, 12)
    with pytest.raises(InvalidRequest, match="and long_text is error"):
        TruncationParameters(long_text="error").rule().check(INPUTS, 14, 12)


def test_the_side_to_cut() -> None:
    assert TruncationParameters().rule().side is None, "the model's"
    assert TruncationParameters(truncation_direction="Right").rule().side == "right"
    assert TruncationParameters(truncation_direction="LEFT").rule().side == "left"


def test_one_input_or_a_list() -> None:
    assert LIMITS.listed("a") == [(INPUTS, "a")]
    assert LIMITS.listed([5, 6]) == [(INPUTS, [5, 6])]  # the token ids of one text
    assert LIMITS.listed(["a"] * 4) == [(INPUTS.below(index), "a") for index in range(4)]
    assert str(LIMITS.listed([[5], [6]])[1][0]) == "inputs[1]"
    with pytest.raises(EmptyRequest):
        LIMITS.listed([])
    with pytest.raises(InvalidRequest, match="5 texts; the limit is 4"):
        LIMITS.listed(["a"] * 5)


def test_limits_are_inclusive() -> None:
    LIMITS.check_text("a" * 200, INPUTS)
    with pytest.raises(InvalidRequest, match="inputs has 201 characters; the limit is 200"):
        LIMITS.check_text("a" * 201, INPUTS)
    with pytest.raises(EmptyRequest, match="inputs is empty"):
        LIMITS.check_text("", INPUTS)
    LIMITS.check_results(60, "the texts need")
    with pytest.raises(InvalidRequest, match="the texts need 61 predictions; the limit is 60"):
        LIMITS.check_results(61, "the texts need")
    check_range(2, 2, 4, "top_k")
    check_range(4, 2, 4, "top_k")
    for value in (1, 5):
        with pytest.raises(InvalidRequest, match=f"top_k must be between 2 and 4, got {value}"):
            check_range(value, 2, 4, "top_k")
