"""The special tokens around texts, and the characters of tokens.

Export, training, evaluation and the service build every sequence with `SpecialTokens`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Side = Literal["left", "right"]
"""The end of a text that is cut if the text is too long."""

TEXT_TOKENS = 2
"""Number of special tokens around one text."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids of a tokenizer's special tokens, and their places around texts.

    Attributes:
        cls: the token before a text, ``[CLS]`` or ``<s>``.
        sep: the token after a text, ``[SEP]`` or ``</s>``.
        mask: the mask token; None: the vocabulary has no mask token.
        separators: number of ``sep`` between the texts of a pair.
        second_type: token type of a pair's second text and of the ``sep`` after it.
    """

    cls: int
    sep: int
    mask: int | None
    separators: int = 1
    second_type: int = 1

    @property
    def pair_tokens(self) -> int:
        """The number of special tokens around and between two texts."""
        return TEXT_TOKENS + self.separators

    def text(self, ids: Iterable[int]) -> list[int]:
        """Return the sequence of one text."""
        return [self.cls, *ids, self.sep]

    def pair(self, first: Iterable[int], second: Iterable[int]) -> list[int]:
        """Return the sequence of a pair."""
        return [self.cls, *first, *[self.sep] * self.separators, *second, self.sep]

    def second_start(self, first_tokens: int) -> int:
        """Return the index of the second text's first token in the sequence of a pair."""
        return 1 + first_tokens + self.separators

    def pair_types(self, first_tokens: int, second_tokens: int) -> NDArray[np.int32]:
        """Return the token types of a pair, int32 [S]."""
        types = np.zeros(self.pair_tokens + first_tokens + second_tokens, np.int32)
        types[self.second_start(first_tokens) :] = self.second_type
        return types


def without_space(text: str, offsets: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the offsets of tokens without white space at both ends of a token.

    The offsets of tokens that begin with a mark for the space before them include that space. A
    token that is only white space keeps its offsets.

    Args:
        text: the text.
        offsets: (start, end) of each token, in characters of the text.
    """
    return [_trimmed(text, start, end) for start, end in offsets]


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    first, last = start, end
    while first < last and text[first].isspace():
        first += 1
    while first < last and text[last - 1].isspace():
        last -= 1
    return (first, last) if first < last else (start, end)
