"""Redaction: where entities of windows and patterns overlap, what is refused, and what forms count."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from phonenumbers import Leniency, PhoneNumberMatcher

from cloze.model_store.heads import ArrayResult
from cloze.service.tasks import patterns
from cloze.service.tasks.patterns import Pattern, find
from cloze.service.tasks.redact import Redaction
from tests.support.task_model import LABELS, context, decoded, prepared

OUTSIDE, PER, I_PER, LOC = range(len(LABELS))


def tagged(tokens: int, labels: dict[int, int] | None = None, logit: float = 9) -> dict[str, Any]:
    """Return the outputs of a window, of so many tokens with these labels."""
    logits = np.zeros((1 + tokens + 1, len(LABELS)), np.float32)
    logits[:, OUTSIDE] = 9
    for token, label in (labels or {}).items():
        logits[1 + token] = 0
        logits[1 + token, label] = logit
    return {"token_classification": ArrayResult(logits)}


def redacted(text: str, *windows: dict[str, Any], **parameters: Any) -> Redaction:
    request = prepared("redact", text, **parameters)
    assert len(request.encodings) == len(windows)
    [result] = decoded("redact", request, list(windows))
    return result


TEXT = "a b c d e f g h i j k l m n"
"""A text of 14 tokens: two windows of 10 tokens and of 6, which share `i` and `j`."""


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({7: PER, 8: I_PER}, {0: LOC}, "a b c d e f g <PER_1> j k l m n"),
        ({8: LOC}, {0: PER, 1: I_PER}, "a b c d e f g h <PER_1> k l m n"),
        ({8: LOC, 9: LOC}, {1: PER, 2: I_PER, 3: I_PER}, "a b c d e f g h <PER_1> m n"),
        ({6: PER, 7: I_PER, 8: I_PER, 9: I_PER}, {0: LOC}, "a b c d e f <PER_1> k l m n"),
    ],
)
def test_all_that_windows_find_is_replaced_with_the_longer_one_s_label(
    first: dict[int, int], second: dict[int, int], expected: str
) -> None:
    result = redacted(TEXT, tagged(10, first), tagged(6, second, logit=5))
    assert result.text == expected
    [one] = result.replacements
    assert TEXT[one.start : one.end] == one.text
    assert result.text[one.redacted_start : one.redacted_end] == one.placeholder


def test_of_equally_long_entities_the_likelier_has_the_label() -> None:
    for logits, label in (((9, 5), "LOC"), ((5, 9), "PER")):
        first, second = logits
        windows = tagged(10, {8: LOC}, first), tagged(6, {0: PER}, second)
        [one] = redacted(TEXT, *windows).replacements
        assert one.label == label


def test_neighbours_are_two_names() -> None:
    assert redacted("a,b", tagged(3, {0: PER, 1: LOC})).text == "<PER_1><LOC_1>b"
    windows = tagged(10, {8: LOC}), tagged(6, {1: PER})
    result = redacted("a b c d e f g h i,k l m n", *windows)
    assert result.text == "a b c d e f g h <LOC_1><PER_1>k l m n"


@pytest.mark.parametrize("label", ["LOC", "loc", "a b"])
def test_a_placeholder_that_the_text_has_is_not_given_again(label: str) -> None:
    labels = {"labels": (*LABELS[:-1], label)}
    described = {"token_classification": labels}
    model = context(tasks=("token-classification",), embedding=None, heads=described)
    request = prepared("redact", f"<{label}_1> b", model)
    [encoding] = request.encodings
    outputs = [tagged(len(encoding) - 2, {len(encoding) - 3: LOC})]
    [result] = decoded("redact", request, outputs, model)
    assert result.text == f"<{label}_1> <{label}_2>"


def test_a_word_is_replaced_whole_by_its_first_token() -> None:
    assert redacted("walked home", tagged(6, {0: PER})).text == "<PER_1> home"
    even = tagged(1)
    even["token_classification"].array[:] = [-200, 0, 0, -200]
    assert redacted("a", even, min_score=0.5).text == "<PER_1>", "of the least score"


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("IBAN", "to NO9386011117947", ["NO9386011117947"]),
        ("IBAN", "RU0304452522540817810538091310419", ["RU0304452522540817810538091310419"]),
        ("CARD", "4222222222222", ["4222222222222"]),  # 13 digits
        ("CARD", "a 4000000000000000006.", ["4000000000000000006"]),  # 19 digits
        ("CARD", "400000000002", []),  # 12 digits, whose check digit is right
        ("PHONE", "1234567, " * 40 + "+49 30 123456", ["+49 30 123456"]),  # after many others
    ],
)
def test_the_shortest_and_the_longest_are_found(
    pattern: Pattern, text: str, expected: list[str]
) -> None:
    assert [text[start:end] for start, end in find(text, pattern)] == expected


@pytest.mark.timeout(30)
def test_a_long_run_of_characters_is_read_once() -> None:
    """A search that begins again at each of them would take minutes."""
    assert list(find("a" * 300_000, "EMAIL")) == []


SLICE = patterns._SLICE_CHARACTERS


def library_s_phones(text: str, region: str | None) -> list[tuple[int, int]]:
    matches = PhoneNumberMatcher(text, region, Leniency.VALID, len(text))
    return [(match.start, match.end) for match in matches]


def places_near_the_end_of_a_slice(found: str) -> list[tuple[int, str]]:
    return [
        (before, "a " * (before // 2) + " " * (before % 2) + found)
        for before in range(SLICE - len(found) - 2, SLICE + 3)
    ]


@pytest.mark.parametrize("number", ["+49 30 123456", "(030) 123456 ext. 7", "++((((030 123456"])
def test_a_number_at_the_end_of_a_slice_is_found(number: str) -> None:
    for _, text in places_near_the_end_of_a_slice(number):
        places = library_s_phones(f"{text} b", "DE")
        assert len(places) == 1
        assert list(find(f"{text} b", "PHONE", "DE")) == places


PARTS = ["+49 30 123456", "030 123456", "0301234567/030 765432", "2012-01-02 08", ":30", "1"]
PARTS += ["12(3): 211-227 (2003)", "3/10/2011", "(", "+", "/x", " - ", "a", "\n", "$", "\u0663" * 9]
PARTS += ["1" * 25, "5 " * 30, " ext. 123456", "#", "(650) 223 3345 (754) 223 3321", " x12"]


@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_numbers_are_those_of_the_library(text: str) -> None:
    for region in ("DE", "US", None):
        assert list(find(text, "PHONE", region)) == library_s_phones(text, region)


def test_a_candidate_has_a_longest_length() -> None:
    """A search for a number in each of its parts takes the square of the length."""
    text = "030 123456" + " " * patterns._LONGEST_PHONE + "ext. 7"
    assert list(find(text, "PHONE", "DE")) == [(0, 10)]


def test_an_address_at_the_end_of_a_slice_is_found() -> None:
    address = "ada.lovelace@example.org"
    for before, text in places_near_the_end_of_a_slice(address):
        assert list(find(f"{text}, b", "EMAIL")) == [(before, before + len(address))]
    alone = "a" * (2 * SLICE) + "@example.org"
    assert list(find(alone, "EMAIL")) == [(0, len(alone))]
