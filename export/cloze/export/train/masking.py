"""Chooses the tokens to mask and their replacements. Does not import torch.

Sources: Devlin et al. 2019, section 3.1 (15 %, 80/10/10; whole words: the release notes of
google-research/bert); Joshi et al. 2020, "SpanBERT", section 3.1 (spans). The caller's generator
decides whether masks differ per epoch (Liu et al. 2019, "RoBERTa", section 4.1).
"""

import dataclasses
import re
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cloze.export.errors import TrainError
from cloze.export.train.corpus import is_byte_level

_LONGEST_SPAN = 10
_SPAN_SHARES = 0.8 ** np.arange(_LONGEST_SPAN) / (0.8 ** np.arange(_LONGEST_SPAN)).sum()
"""Probabilities of spans of 1 to 10 words: geometric with p = 0.2, cut at 10. The mean is 3.8."""


class Unit(StrEnum):
    """The unit of text that is masked as a whole."""

    TOKEN = "token"
    WHOLE_WORD = "whole-word"
    SPAN = "span"


@dataclass(frozen=True, slots=True)
class MaskedSequence:
    """One sequence with some of its tokens masked.

    Attributes:
        input_ids: int64 [S], the input of the model.
        positions: int64 [M], ascending positions of the chosen tokens.
        labels: int64 [M], the original tokens at these positions.
        spans: int64 [M, 2], first and last position of the run of chosen tokens around each one.
    """

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    labels: NDArray[np.int64]
    spans: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Masking:
    """Masks a share of a sequence's tokens.

    Attributes:
        rate: share of ordinary tokens to choose. At least one ordinary token is chosen.
        mask_id: id of ``[MASK]``.
        special: bool [V], tokens that are never chosen and never used as a replacement.
        continues: bool [V], tokens that continue the word before them.
        replace: share of chosen tokens that become ``[MASK]``, and share that become a random
            token. All other chosen tokens stay.
        final_rate: rate at the end of a run, see `at`; None: constant rate.
    """

    unit: Unit
    rate: float
    mask_id: int
    special: NDArray[np.bool_]
    continues: NDArray[np.bool_]
    replace: tuple[float, float] = (0.8, 0.1)
    final_rate: float | None = None

    def at(self, progress: float) -> "Masking":
        """Return the masking at ``progress`` in [0, 1] of a run.

        The rate changes linearly to its final value. Source: Ankner et al. 2024, "Dynamic Masking
        Rate Schedules for MLM Pretraining", section 3.
        """
        if self.final_rate is None:
            return self
        rate = self.rate + (self.final_rate - self.rate) * progress
        return dataclasses.replace(self, rate=rate, final_rate=None)

    def __call__(self, input_ids: NDArray[np.int64], rng: np.random.Generator) -> MaskedSequence:
        """Mask tokens of ``input_ids`` int64 [S], which include special tokens but no padding."""
        ordinary = ~self.special[input_ids]
        units = self._units(input_ids, ordinary)
        count = max(1, round(self.rate * ordinary.sum())) if len(units) else 0
        choose = self._choose_spans if self.unit is Unit.SPAN else self._choose_units
        chosen = choose(units, count, rng)
        positions = np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, np.int64)
        # One draw replaces a whole span. Otherwise each token has its own draw.
        pieces = chosen if self.unit is Unit.SPAN else positions[:, None]
        masked_ids, labels = self._replace(input_ids, pieces, rng), input_ids[positions]
        return MaskedSequence(masked_ids, positions, labels, _runs(positions))

    def _replace(
        self,
        input_ids: NDArray[np.int64],
        pieces: list[NDArray[np.int64]] | NDArray[np.int64],
        rng: np.random.Generator,
    ) -> NDArray[np.int64]:
        """Return a copy of ``input_ids`` with replaced tokens at some of the ``pieces``."""
        masked_ids = input_ids.copy()
        draws = rng.random(len(pieces))
        random_ids = np.flatnonzero(~self.special)
        mask_share, random_share = self.replace
        for piece, draw in zip(pieces, draws, strict=True):
            if draw < mask_share:
                masked_ids[piece] = self.mask_id
            elif draw < mask_share + random_share:
                masked_ids[piece] = rng.choice(random_ids, len(piece))
        return masked_ids

    def _units(
        self, input_ids: NDArray[np.int64], ordinary: NDArray[np.bool_]
    ) -> list[NDArray[np.int64]]:
        """Return the positions of each token, or of each whole word, in order.

        A span consists of whole words.
        """
        positions = np.flatnonzero(ordinary)
        if not len(positions):
            return []
        if self.unit is Unit.TOKEN:
            return list(positions[:, None])
        starts = ~self.continues[input_ids[positions]] | (np.diff(positions, prepend=-2) > 1)
        return np.split(positions, np.flatnonzero(starts[1:]) + 1)

    @staticmethod
    def _choose_units(
        units: list[NDArray[np.int64]], count: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        """Choose units in random order until they have ``count`` tokens.

        A unit that would exceed ``count`` is skipped, unless it is the first.
        """
        chosen: list[NDArray[np.int64]] = []
        remaining = count
        for index in rng.permutation(len(units)):
            unit = units[index]
            if len(unit) <= remaining or not chosen:
                chosen.append(unit)
                remaining -= len(unit)
            if remaining <= 0:
                break
        return chosen

    @staticmethod
    def _choose_spans(
        units: list[NDArray[np.int64]], count: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        """Choose spans of 1 to 10 words, with geometric lengths, until they have ``count`` tokens.

        The last span is shortened to the remaining number of tokens.
        """
        taken = np.zeros(len(units), bool)
        chosen: list[NDArray[np.int64]] = []
        remaining = count
        for _ in range(10 * len(units)):
            if remaining <= 0:
                break
            length = min(1 + int(rng.choice(_LONGEST_SPAN, p=_SPAN_SHARES)), len(units))
            first = int(rng.integers(len(units) - length + 1))
            while length > 1 and sum(map(len, units[first : first + length])) > remaining:
                length -= 1
            positions = np.concatenate(units[first : first + length])
            # The [SEP] between two texts is a boundary.
            crosses_special = positions[-1] - positions[0] != len(positions) - 1
            overlaps = taken[first : first + length].any()
            if overlaps or crosses_special or len(positions) > remaining:
                continue
            taken[first : first + length] = True
            chosen.append(positions)
            remaining -= len(positions)
        return chosen or [units[rng.integers(len(units))] for _ in range(min(count, 1))]


_WITHOUT_SPACES = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""A character of a script without spaces: Thai, Lao, Burmese, Khmer, Japanese or Chinese."""


def make_masking(
    text: Tokenizer,
    mask_id: int | None,
    unit: Unit = Unit.TOKEN,
    rate: float = 0.15,
    *,
    replace: tuple[float, float] = (0.8, 0.1),
    final_rate: float | None = None,
) -> Masking:
    """Return the masking for the vocabulary of a tokenizer; see `Masking` for the arguments.

    Raises:
        TrainError: the vocabulary has no mask token.
    """
    if mask_id is None:
        raise TrainError("the tokenizer has no mask token, which training needs")
    numbers = list(text.get_vocab().values())
    special = np.ones(max(numbers) + 1, bool)  # also the ids between those of the vocabulary
    special[numbers] = False
    added = text.get_added_tokens_decoder()
    special[[number for number, token in added.items() if token.special]] = True
    return Masking(unit, rate, mask_id, special, continuations(text), replace, final_rate)


def continuations(text: Tokenizer) -> NDArray[np.bool_]:
    """Return bool [V], the tokens that continue the word before them.

    WordPiece marks them with ``##``. Byte-level BPE marks the tokens that begin a word with ``Ġ``,
    and SentencePiece with ``▁``. In a script without spaces, each token of SentencePiece begins a
    word, else a text would be one word.
    """
    vocabulary = text.get_vocab()
    continues = np.zeros(max(vocabulary.values()) + 1, bool)
    prefix = getattr(text.model, "continuing_subword_prefix", None)
    has_bytes = is_byte_level(text)
    space = "Ġ" if has_bytes else "▁"
    for token, number in vocabulary.items():
        if prefix:
            continues[number] = token.startswith(prefix)
        elif not token.startswith(space):
            continues[number] = has_bytes or not _WITHOUT_SPACES.match(token)
    return continues


def _runs(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first and last position of the run of consecutive positions around each position.

    Args:
        positions: int64 [M], ascending.

    Returns:
        int64 [M, 2].
    """
    if not len(positions):
        return np.zeros((0, 2), np.int64)
    run = np.cumsum(np.diff(positions, prepend=positions[0]) > 1)
    first = np.searchsorted(run, run, "left")
    last = np.searchsorted(run, run, "right") - 1
    return np.stack([positions[first], positions[last]], 1)
