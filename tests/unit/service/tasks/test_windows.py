"""Which tokens of a long text are read: windows, one end, or none."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloze.service.errors import Location
from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.texts import LongText, LongTextRule, TextEncoder, centred
from tests.support.refusals import refused
from tests.support.task_model import CONTEXT, context, limited, manifest

WIDE = limited(max_request_tokens=10_000)


def divider(choice: LongText, **rule: Any) -> TextEncoder:
    return TextEncoder(LongTextRule(choice, **rule), WIDE, 12)


def divided(tokens: int, room: int, stride: int | None) -> list[tuple[int, int]]:
    return divider("window", stride=stride).divide(INPUTS, tokens, 12 - room)


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 12), st.data())
def test_windows_are_as_many_as_the_text_needs(tokens: int, size: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(0, size - 1))
    expected = [(0, min(size, tokens))]
    while expected[-1][1] < tokens:
        first = expected[-1][0] + size - stride
        expected.append((first, min(first + size, tokens)))
    assert divided(tokens, size, stride) == expected


def test_windows_of_all_texts_are_counted_whole() -> None:
    one = TextEncoder(LongTextRule("window"), CONTEXT, 12)  # 400 tokens per request
    assert one.divide(INPUTS, 20, around=4) == [(0, 8), (6, 14), (12, 20)]  # 3 windows x 12
    assert one.divide(INPUTS, 8, around=4) == [(0, 8)]  # no window
    one.rule = LongTextRule("window", stride=0)
    one.divide(INPUTS, 30 * 8, around=4)  # 360 more
    last = Location(("last",))
    with refused("limit_exceeded", 420, 400, at="last"):
        one.divide(last, 9, around=4)


@pytest.mark.parametrize("choice", ["error", "truncate", "window"])
def test_a_text_that_fits_is_read_as_a_whole(choice: LongText) -> None:
    for tokens in (0, 1, 10):
        assert divider(choice, side="left").divide(INPUTS, tokens) == [(0, tokens)]
    assert divider(choice).divide(INPUTS, 1, around=11) == [(0, 1)]
    with refused("text_too_long", 12, at="inputs"):
        divider(choice).divide(INPUTS, 1, around=12)


def test_a_cut_text_has_one_end_of_its_tokens() -> None:
    assert divider("truncate").divide(INPUTS, 11) == [(0, 10)]
    assert divider("truncate", side="left").divide(INPUTS, 11, around=5) == [(4, 11)]
    left = context(tokenizer=manifest().tokenizer.model_dump() | {"truncation_side": "left"})
    by_model = TextEncoder(LongTextRule("truncate"), left, 12)
    assert by_model.divide(INPUTS, 11) == [(1, 11)]
    by_request = TextEncoder(LongTextRule("truncate", side="right"), left, 12)
    assert by_request.divide(INPUTS, 11) == [(0, 10)]


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_a_part_has_its_middle_and_as_many_tokens_as_fit(
    tokens: int, room: int, data: st.DataObject
) -> None:
    middle = data.draw(st.integers(0, tokens - 1))
    first, end = centred(middle, tokens, room)
    assert 0 <= first <= middle < end <= tokens
    assert end - first == min(room, tokens)
    assert first in (0, tokens - room, middle - room // 2)
