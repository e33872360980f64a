"""Divides long texts at places where a tokenizer divides them anyway.

The tokenizers library needs about 250 bytes per character while it tokenizes a text, so a text of a
megabyte would need 250 MB. In pieces, it needs only the memory of one group of pieces.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

_PIECE_CHARACTERS = 16_384
"""Most characters of a piece, unless the text has no place to divide it."""

_GROUP_CHARACTERS = 65_536
"""Characters of the pieces that are tokenized at once."""

_SPACE_OR_PUNCTUATION = re.compile("[ \\n\\t\\r.,;:!?\u4e00-\u9fff]")
"""White space, and punctuation and ideographs, each of which is a token of its own.

Source: Devlin et al. 2019, `BasicTokenizer`.
"""

_SINGLE_SPACE = re.compile(r"(?<=\S) (?=\w)")
"""A space before a word, with which a token begins, in byte-level BPE and after SentencePiece.

Not before a combining mark, which a normaliser may join to the space.
"""

Places = re.Pattern[str]
"""Matches each character before which a text may be divided."""


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


def find_places(parts: Mapping[str, Any]) -> Places | None:
    """Return where a text may be divided so that its pieces have the tokens of the whole text.

    Args:
        parts: the tokenizer, in the format of the tokenizers library.

    Returns:
        The places; None if no places are known for the tokenizer.
    """
    places = _places_of(parts.get("normalizer") or {}, parts.get("pre_tokenizer") or {})
    if places is None:
        return None
    for token in parts["added_tokens"]:
        takes_space = token["rstrip"] or (token["lstrip"] and places is _SPACE_OR_PUNCTUATION)
        if takes_space or places.search(token["content"]):
            return None
    return places


def _places_of(normalizer: dict[str, Any], pre_tokenizer: dict[str, Any]) -> Places | None:
    steps = [step.get("type") for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer])]
    if steps == ["BertPreTokenizer"] and normalizer.get("type") == "BertNormalizer":
        return _SPACE_OR_PUNCTUATION
    is_byte_level = steps == ["ByteLevel"] and not normalizer
    if is_byte_level or steps == ["WhitespaceSplit", "Metaspace"] or steps == ["Metaspace"]:
        return _SINGLE_SPACE
    return None


def divide(text: str, places: Places, size: int = _PIECE_CHARACTERS) -> Iterator[tuple[int, str]]:
    """Yield the parts of a text, each with its first character.

    Args:
        text: the text.
        places: where the text may be divided.
        size: most characters of a part; a part without a place to divide it is longer.
    """
    start = 0
    while len(text) - start > size:
        end = _place(text, places, start, start + size)
        yield start, text[start:end]
        start = end
    yield start, text[start:]


def _place(text: str, places: Places, start: int, wanted: int) -> int:
    """Return the last place to divide a text up to ``wanted``, else the first one after it."""
    space = text.rfind(" ", (start + wanted) // 2, wanted + 1)
    if space > start and places.match(text, space):
        return space
    for index in range(wanted, start, -1):
        if places.match(text, index):
            return index
    found = places.search(text, wanted + 1)
    return found.start() if found else len(text)


def groups(texts: Iterable[str], places: Places | None) -> Iterator[list[Piece]]:
    """Yield the pieces of texts in order, in groups that are tokenized at once.

    Args:
        texts: the texts.
        places: where texts may be divided; None: nowhere.
    """
    group: list[Piece] = []
    characters = 0
    for number, text in enumerate(texts):
        for start, content in [(0, text)] if places is None else divide(text, places):
            if group and characters + len(content) > _GROUP_CHARACTERS:
                yield group
                group, characters = [], 0
            group.append(Piece(number, start, content))
            characters += len(content)
    if group:
        yield group
