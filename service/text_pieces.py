"""Divides long texts at places where a BERT tokenizer divides them anyway.

The tokenizers library needs about 250 bytes per character while it tokenizes a text, so a text of a
megabyte would need 250 MB. In pieces, it needs only the memory of one group of pieces.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_PIECE_CHARACTERS = 16_384
"""Most characters of a piece, unless the text has no place to divide it."""

_GROUP_CHARACTERS = 65_536
"""Characters of the pieces that are tokenized at once."""

_SPACES = " \n\t\r"
_SEPARATORS = ".,;:!?"
"""Punctuation is a token of its own (Devlin et al. 2019, `BasicTokenizer`)."""

_PLACE = re.compile(f"[{_SPACES}{_SEPARATORS}\u4e00-\u9fff]")
"""A character before which a text may be divided; each ideograph is a token of its own."""


class Piece(NamedTuple):
    """A part of a text.

    Attributes:
        text: number of the text.
        start: first character of the part.
        content: the part.
    """

    text: int
    start: int
    content: str


def is_divisible(tokenizer_json: str) -> bool:
    """Return whether a tokenizer gives the pieces of a text the tokens of the whole text.

    Args:
        tokenizer_json: the tokenizer's file, in the format of the tokenizers library.
    """
    parts = json.loads(tokenizer_json)
    kinds = [(parts.get(name) or {}).get("type") for name in ("normalizer", "pre_tokenizer")]
    return kinds == ["BertNormalizer", "BertPreTokenizer"] and not any(
        token["lstrip"] or token["rstrip"] or _PLACE.search(token["content"])
        for token in parts["added_tokens"]
    )


def divide(text: str, size: int = _PIECE_CHARACTERS) -> Iterator[tuple[int, str]]:
    """Yield the parts of a text, each with its first character.

    Args:
        text: the text.
        size: most characters of a part; a part without a place to divide it is longer.
    """
    start = 0
    while len(text) - start > size:
        end = _place(text, start, start + size)
        yield start, text[start:end]
        start = end
    yield start, text[start:]


def _place(text: str, start: int, wanted: int) -> int:
    """Return the last place to divide a text up to ``wanted``, else the first one after it."""
    half = (start + wanted) // 2
    place = max(text.rfind(space, half, wanted + 1) for space in _SPACES)
    if place > start:
        return place
    for index in range(wanted, start, -1):
        if _PLACE.match(text, index):
            return index
    found = _PLACE.search(text, wanted + 1)
    return found.start() if found else len(text)


def groups(texts: Iterable[str], *, divisible: bool) -> Iterator[list[Piece]]:
    """Yield the pieces of texts in order, in groups that are tokenized at once.

    Args:
        texts: the texts.
        divisible: whether texts may be divided, see `is_divisible`.
    """
    group: list[Piece] = []
    characters = 0
    for number, text in enumerate(texts):
        for start, content in divide(text) if divisible else [(0, text)]:
            if group and characters + len(content) > _GROUP_CHARACTERS:
                yield group
                group, characters = [], 0
            group.append(Piece(number, start, content))
            characters += len(content)
    if group:
        yield group
