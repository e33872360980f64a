"""Divides long texts where their pieces have the tokens of the whole text.

The tokenizers library needs about 250 bytes per character while it tokenizes a text. In pieces, a
text needs only the memory of one group of them.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from cloze.service.errors import TextTooLong

_PIECE_CHARACTERS = 16_384
"""Most characters of a piece, unless the text has no boundary there."""

_GROUP_CHARACTERS = 65_536
"""Characters of the pieces that are tokenized at once, after the normaliser."""

_MOST_GROWTH = 2
"""How many times as many characters a piece longer than a group may become by the normaliser."""

_MOST_BYTES = 1_000_000
"""Most bytes of a piece without a space, for which the library needs 75 times as much memory.

Other tokenizers read whole texts of languages without spaces, so they have no such limit.
"""

SPACE_OR_PUNCTUATION = re.compile("[ \\n\\t\\r.,;:!?\u4e00-\u9fff]")
"""White space, and punctuation and ideographs, each of which is a token of its own.

Source: Devlin et al. 2019, `BasicTokenizer`.
"""

_SINGLE_SPACE = re.compile(r"(?<=[\w!-~])(?<![\u0e33\u0eb3\uff9e\uff9f]) (?=\w)")
"""A space before a word, with which a token begins, in byte-level BPE and after SentencePiece.

Not before a combining mark, which a normaliser may join to the space, nor after one: a mark after a
no-break space may become a second space before this one. The four letters are such marks too.
"""

Boundary = re.Pattern[str]
"""Matches each character before which a text may be divided."""


class Piece(NamedTuple):
    """A part of a text: the number of the text, and the first character of the part."""

    text: int
    start: int
    content: str


def find_boundary(parts: Mapping[str, Any]) -> Boundary | None:
    """Return where a text may be divided so that its pieces have the tokens of the whole text.

    The parts are those of the tokenizer's file. None: no boundaries are known for the tokenizer.
    """
    normalizer, pre_tokenizer = parts.get("normalizer") or {}, parts.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    types = [step.get("type") for step in steps]
    # Without these settings, a token may have characters on both sides of a space.
    divides = all(step.get("use_regex", True) and step.get("split", True) for step in steps)
    if types == ["BertPreTokenizer"] and normalizer.get("type") == "BertNormalizer":
        boundary = SPACE_OR_PUNCTUATION
    elif types == ["WhitespaceSplit", "Metaspace"] or (
        divides and (types == ["Metaspace"] or (types == ["ByteLevel"] and not normalizer))
    ):
        boundary = _SINGLE_SPACE
    else:
        return None
    for token in parts["added_tokens"]:
        takes_space = token["rstrip"] or (token["lstrip"] and boundary is SPACE_OR_PUNCTUATION)
        if takes_space or boundary.search(token["content"]):
            return None
    return boundary


def divide(
    text: str, boundary: Boundary | None, size: int = _PIECE_CHARACTERS
) -> Iterator[tuple[int, str]]:
    """Yield the parts of a text, each with the number of its first character.

    A part without a boundary is longer than the size, in characters.
    """
    start = 0
    while boundary is not None and len(text) - start > size:
        before = range(start + size, start, -1)
        end = next((index for index in before if boundary.match(text, index)), 0)
        if not end:
            following = boundary.search(text, start + size + 1)
            end = following.start() if following else len(text)
        yield start, text[start:end]
        start = end
    yield start, text[start:]


def groups(
    texts: Iterable[str], boundary: Boundary | None, *, expands: bool = False
) -> Iterator[list[Piece]]:
    """Yield the pieces of texts in order, in groups that are tokenized at once.

    A tokenizer expands texts if it replaces characters by their compatibility forms.
    """
    group: list[Piece] = []
    characters = 0
    for number, text in enumerate(texts):
        for start, content, size in _pieces(text, boundary, expands=expands):
            if group and characters + size > _GROUP_CHARACTERS:
                yield group
                group, characters = [], 0
            group.append(Piece(number, start, content))
            characters += size
    if group:
        yield group


def _pieces(
    text: str, boundary: Boundary | None, *, expands: bool
) -> Iterator[tuple[int, str, int]]:
    """Yield the parts of a text: first character, content, characters after the normaliser."""
    length = _compatible_length if expands else len
    for start, content in divide(text, boundary):
        growth = max(1, length(content) // max(1, len(content)))
        for first, part in divide(content, boundary, _PIECE_CHARACTERS // growth):
            size = length(part)
            if size > _GROUP_CHARACTERS and size >= _MOST_GROWTH * len(part):
                raise TextTooLong(
                    f"{len(part)} characters of a text, without a space, are {size} characters "
                    f"for the model's tokenizer; the limit is {_GROUP_CHARACTERS}"
                )
            if boundary is SPACE_OR_PUNCTUATION and len(part) > _MOST_BYTES // 4:
                count = len(part.encode("utf-8", "surrogatepass"))
                if count > _MOST_BYTES:
                    raise TextTooLong(
                        f"{len(part)} characters of a text, without a space, are {count} bytes; "
                        f"the limit is {_MOST_BYTES}"
                    )
            yield start + first, part, size


def _compatible_length(text: str) -> int:
    """Return the number of characters of a text in Unicode's compatibility form NFKD."""
    parts = (text[at : at + _PIECE_CHARACTERS] for at in range(0, len(text), _PIECE_CHARACTERS))
    return sum(len(unicodedata.normalize("NFKD", part)) for part in parts)
