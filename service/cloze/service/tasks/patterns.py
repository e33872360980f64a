"""Personal data of a fixed form: e-mail addresses, telephone, bank account and card numbers.

Numbers count only with their check digits: ISO 7064 (mod 97-10) for IBANs, Luhn for cards. The
library phonenumbers finds telephone numbers, by the numbering plans of all countries.
"""

import re
from collections.abc import Callable, Iterator
from typing import Final, Literal

from cloze.service.threads import check_awaited

Pattern = Literal["EMAIL", "PHONE", "IBAN", "CARD"]

Place = tuple[int, int]
"""(start, end) in characters of a text."""

_LOCAL: Final = r"[\w.!#$%&'*+/=?^`{|}~-]"

# Each match begins where no character of the first part is before it, so that a long run of such
# characters is read once.
_EMAIL: Final = re.compile(rf"(?<!{_LOCAL}){_LOCAL}+@(?:[\w-]+\.)+[\w-]*\w")
_IBAN: Final = re.compile(r"(?<![^\W_])[A-Z]{2}\d\d(?:[ -]?[A-Z\d]){11,30}", re.ASCII | re.I)
_CARD: Final = re.compile(r"(?<!\w)\d(?:[ -]?\d){12,18}", re.ASCII)

_NO_EMAIL: Final = re.compile(r"[^\w.!#$%&'*+/=?^`{|}~@-]")
"""A character that no e-mail address has."""

_SLICE_CHARACTERS: Final = 4096
"""Most characters that a search reads before it asks whether anybody waits for its results.

A regular expression stops all other threads of the process while it searches, 5 ms here. A run of
characters without a space may be longer in a search for e-mail addresses.
"""

_PHONE_START: Final = 11
"""Characters in which a candidate for a telephone number has its first digit."""

_LONGEST_PHONE: Final = 600
"""Most characters of a candidate: 510, and an extension after any number of spaces."""

_AFTER_PHONE: Final = 3
"""Characters after a candidate that decide whether it is a number: ``:30`` ends a time of day."""


def regions() -> frozenset[str]:
    """Return the countries whose national telephone numbers are known, in two letters."""
    import phonenumbers

    return frozenset(phonenumbers.SUPPORTED_REGIONS)


def find(text: str, pattern: Pattern, region: str | None = None) -> Iterator[Place]:
    """Yield the places of a text that have a form.

    The region is the country of telephone numbers without ``+``, which are not found without it.
    """
    if pattern == "EMAIL":
        yield from _emails(text)
    elif pattern == "PHONE":
        yield from _phones(text, region)
    elif pattern == "IBAN":
        yield from _checked(text, _IBAN, _is_iban, 15)
    else:
        yield from _checked(text, _CARD, _is_card, 13)


def _emails(text: str) -> Iterator[Place]:
    """Yield the places of e-mail addresses; a slice ends where no address can be."""
    start = 0
    while start < len(text):
        check_awaited()
        separator = _NO_EMAIL.search(text, start + _SLICE_CHARACTERS)
        end = separator.start() if separator else len(text)
        yield from (match.span() for match in _EMAIL.finditer(text, start, end))
        start = end


def _phones(text: str, region: str | None) -> Iterator[Place]:
    """Yield the places of telephone numbers.

    They are those of the library's matcher for the whole text. That matcher cannot be stopped, and
    copies the rest of the text for some candidates. Here each candidate has a matcher of its own,
    which reads the candidate and the characters beside it.
    """
    from phonenumbers import Leniency, PhoneNumberMatcher
    from phonenumbers.phonenumberutil import _SECOND_NUMBER_START_PATTERN

    position = 0
    while (candidate := _phone_candidate(text, position)) is not None:
        check_awaited()
        start, end = candidate
        if (second := _SECOND_NUMBER_START_PATTERN.search(text, start, end)) is not None:
            end = second.start()
        before = max(0, start - 1)
        matcher = PhoneNumberMatcher(text[before : end + _AFTER_PHONE], region, Leniency.VALID)
        match = matcher._extract_match(text[start:end], start - before)
        if match is not None:
            yield before + match.start, before + match.end
        position = end if match is None else before + match.end


def _phone_candidate(text: str, position: int) -> Place | None:
    from phonenumbers.phonenumbermatcher import _PATTERN

    while position < len(text):
        check_awaited()
        end = position + _SLICE_CHARACTERS
        first = _PATTERN.search(text, position, end + _PHONE_START)
        if first is not None and first.start() < end:
            start = first.start()
            whole = _PATTERN.match(text, start, start + _LONGEST_PHONE)
            assert whole is not None  # the start alone is a candidate
            return whole.span()
        position = end
    return None


def _checked(
    text: str, candidates: re.Pattern[str], is_valid: Callable[[str], bool], shortest: int
) -> Iterator[Place]:
    """Yield the longest parts of candidates that are valid and end where a word ends."""
    position = 0
    while (match := candidates.search(text, position)) is not None:
        check_awaited()
        start, end = match.span()
        position = start + 1
        ends = [] if text[end : end + 1].isalnum() else [end]
        ends += [index for index in range(end - 1, start, -1) if text[index] in " -"]
        for last in ends:
            number = text[start:last].replace(" ", "").replace("-", "")
            if len(number) >= shortest and is_valid(number):
                yield start, last
                position = last
                break


def _is_iban(number: str) -> bool:
    """Return whether the check digits of an account number are right. Source: ISO 13616."""
    return int("".join(str(int(sign, 36)) for sign in number[4:] + number[:4])) % 97 == 1


def _is_card(number: str) -> bool:
    """Return whether the check digit of a card number is right. Source: ISO/IEC 7812-1."""
    digits = [int(digit) for digit in reversed(number)]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return sum(digits[::2] + doubled) % 10 == 0 and any(digits)
