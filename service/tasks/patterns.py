"""Personal data of a fixed form: e-mail addresses, telephone, bank account and card numbers.

Numbers count only with their check digits: ISO 7064 (mod 97-10) for IBANs, Luhn for cards. The
library phonenumbers finds telephone numbers, by the numbering plans of all countries.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

from cloze.service.abandonment import check_awaited

Pattern = Literal["EMAIL", "PHONE", "IBAN", "CARD"]

Place = tuple[int, int]
"""(start, end) in characters of a text."""

_LOCAL: Final = r"[\w.!#$%&'*+/=?^`{|}~-]"

# Each match begins where no character of the first part is before it, so that a long run of such
# characters is read once.
_EMAIL: Final = re.compile(rf"(?<!{_LOCAL}){_LOCAL}+@(?:[\w-]+\.)+[\w-]*\w")
_IBAN: Final = re.compile(r"(?<![^\W_])[A-Z]{2}\d\d(?:[ -]?[A-Z\d]){11,30}", re.ASCII | re.I)
_CARD: Final = re.compile(r"(?<!\w)\d(?:[ -]?\d){12,18}", re.ASCII)

_SHORTEST_IBAN: Final = 15


def regions() -> frozenset[str]:
    """Return the countries whose national telephone numbers are known, in two letters."""
    import phonenumbers

    return frozenset(phonenumbers.SUPPORTED_REGIONS)


def find(text: str, pattern: Pattern, region: str | None = None) -> Iterator[Place]:
    """Yield the places of a text that have a form.

    Args:
        text: the text.
        pattern: the form.
        region: the country of telephone numbers without ``+``; None: these are not found.
    """
    if pattern == "EMAIL":
        yield from (match.span() for match in _EMAIL.finditer(text))
    elif pattern == "PHONE":
        yield from _phones(text, region)
    elif pattern == "IBAN":
        yield from _checked(text, _IBAN, _is_iban, _SHORTEST_IBAN)
    else:
        yield from _checked(text, _CARD, _is_card, 13)


def _phones(text: str, region: str | None) -> Iterator[Place]:
    from phonenumbers import Leniency, PhoneNumberMatcher

    # The matcher gives up after so many numbers that are none: a text has fewer.
    for match in PhoneNumberMatcher(text, region, Leniency.VALID, len(text)):
        check_awaited()
        yield match.start, match.end


def _checked(
    text: str, candidates: re.Pattern[str], is_valid: Callable[[str], bool], shortest: int
) -> Iterator[Place]:
    """Yield the longest parts of candidates that are valid and end where a word ends."""
    position = 0
    while (match := candidates.search(text, position)) is not None:
        check_awaited()
        start, end = match.span()
        ends = _ends(text, start, end)
        valid = (e for e in ends if _length(text[start:e]) >= shortest and is_valid(text[start:e]))
        found = next(valid, None)
        if found is not None:
            yield start, found
        position = found or start + 1


def _ends(text: str, start: int, end: int) -> Sequence[int]:
    """Return the ends of words between two characters, the last one first."""
    after = text[end : end + 1]
    ends = [] if after.isalnum() else [end]
    return ends + [index for index in range(end - 1, start, -1) if text[index] in " -"]


def _plain(number: str) -> str:
    return number.replace(" ", "").replace("-", "")


def _length(number: str) -> int:
    return len(_plain(number))


def _is_iban(number: str) -> bool:
    """Return whether the check digits of an account number are right. Source: ISO 13616."""
    plain = _plain(number)
    return int("".join(str(int(sign, 36)) for sign in plain[4:] + plain[:4])) % 97 == 1


def _is_card(number: str) -> bool:
    """Return whether the check digit of a card number is right. Source: ISO/IEC 7812-1."""
    digits = [int(digit) for digit in reversed(_plain(number))]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return sum(digits[::2] + doubled) % 10 == 0 and any(digits)
