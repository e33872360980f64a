"""The results of tasks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Vectors(np.ndarray[Any, np.dtype[Any]]):
    """An array of vectors, with the name of their space.

    A part of it has no name, and arithmetic returns plain arrays.

    Attributes:
        embedding_space: vectors of one name may share an index; None if the server gives no name.
    """

    embedding_space: str | None = None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """Return the result of arithmetic as NumPy returns that of plain arrays."""
        return array[()] if return_scalar else array

    @classmethod
    def of(cls, values: NDArray[Any], embedding_space: str | None) -> "Vectors":
        """Return an array with the name of its space, without a copy."""
        vectors = values.view(cls)
        vectors.embedding_space = embedding_space
        return vectors


class SparseVectors(list[list["Word"]]):
    """The words of each text, the heaviest first, with the name of the space of the weights."""

    embedding_space: str | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """A token for a mask, and the text with the token in the mask's place."""

    score: float
    token: int
    token_str: str
    sequence: str


@dataclass(frozen=True, slots=True)
class WordPrediction:
    """A word for a mask, with the ids of its sub-tokens, and the text with the word in it."""

    score: float
    tokens: list[int]
    token_str: str
    sequence: str


@dataclass(frozen=True, slots=True)
class Filling:
    """Tokens for all masks of a text, with their joint probability, and the filled text."""

    score: float
    tokens: list[int]
    token_strs: list[str]
    sequence: str


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of a text, ``text[start:end]``, and the logarithm of its probability."""

    token: str
    start: int
    end: int
    log_probability: float


@dataclass(frozen=True, slots=True)
class Score:
    """The pseudo-log-likelihood of a text: the sum over its tokens."""

    score: float
    tokens: list[ScoredToken]


@dataclass(frozen=True, slots=True)
class Answer:
    """A span of the context, ``context[start:end]``, that answers a question."""

    answer: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Label:
    """A label of a text, and its score."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Entity:
    """An entity, ``text[start:end]``, or one token if tokens are not grouped."""

    entity: str
    score: float
    word: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class NamedEntity:
    """An entity of one of your own labels; ``text`` is its text, from ``start`` to ``end``."""

    start: int
    end: int
    text: str
    label: str
    score: float


@dataclass(frozen=True, slots=True)
class Replacement:
    """An entity of a text, ``text[start:end]``, and its placeholder in the redacted text."""

    label: str
    placeholder: str
    text: str
    start: int
    end: int
    redacted_start: int
    redacted_end: int
    score: float


@dataclass(frozen=True, slots=True)
class Redaction:
    """A text with placeholders, and what they replace, in the order of the text."""

    text: str
    replacements: list[Replacement]

    def undone(self) -> str:
        """Return the text as it was."""
        parts, position = [], 0
        for each in self.replacements:
            parts += [self.text[position : each.redacted_start], each.text]
            position = each.redacted_end
        return "".join([*parts, self.text[position:]])


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the vocabulary that a text is about, and its weight."""

    index: int
    value: float
    token: str


@dataclass(frozen=True, slots=True)
class Rank:
    """The position of a text in the request, and its score."""

    index: int
    score: float
