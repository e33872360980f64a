"""Redaction: which forms of addresses and numbers count."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from phonenumbers import Leniency, PhoneNumberMatcher

from cloze.service.tasks import patterns
from cloze.service.tasks.patterns import Pattern, find


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
