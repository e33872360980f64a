"""Chooses the tokens to mask and their replacements.

Sources: Devlin et al. 2019, section 3.1 (15 %, 80/10/10; whole words: the release notes of
google-research/bert); Joshi et al. 2020, "SpanBERT", section 3.1 (spans). The caller's generator
decides whether masks differ per epoch (Liu et al. 2019, "RoBERTa", section 4.1).
"""

import re
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cloze.export.errors import TrainError
from cloze.export.measure.corpus import is_byte_level

Ids = NDArray[np.int64]

_LONGEST_SPAN = 10
_SPAN_SHARES = 0.8 ** np.arange(_LONGEST_SPAN) / (0.8 ** np.arange(_LONGEST_SPAN)).sum()
"""Probabilities of spans of 1 to 10 words: geometric with p = 0.2, cut at 10. The mean is 3.8."""


class Unit(StrEnum):
    """The unit of text that is masked as a whole."""

    TOKEN = "token"
    WHOLE_WORD = "whole-word"
    SPAN = "span"


@dataclass(frozen=True, slots=True)
class Masking:
    """Masks a share of a sequence's tokens.

    Attributes:
        mask_id: id of ``[MASK]``.
        special: bool [V], tokens that are never chosen and never used as a replacement.
        continues: bool [V], tokens that continue the word before them.
        replace: share of chosen tokens that become ``[MASK]``, and share that become a random
            token. All other chosen tokens stay.
    """

    unit: Unit
    mask_id: int
    special: NDArray[np.bool_]
    continues: NDArray[np.bool_]
    replace: tuple[float, float] = (0.8, 0.1)

    def __call__(self, input_ids: Ids, rate: float, rng: np.random.Generator) -> tuple[Ids, Ids]:
        """Mask tokens of ``input_ids`` int64 [S], which include special tokens but no padding.

        Args:
            rate: share of ordinary tokens to choose. At least one ordinary token is chosen.

        Returns:
            int64 [S], the input of the model; int64 [M], ascending positions of the chosen tokens.
        """
        units = self.units(input_ids)
        if not units:
            return input_ids, np.zeros(0, np.int64)
        count = max(1, round(rate * sum(map(len, units))))
        if self.unit is Unit.SPAN:
            chosen = choose_spans(units, count, rng)
        else:
            chosen = _choose_units(units, count, rng)
        # One draw replaces a whole span. Otherwise each token has its own draw.
        sizes = [len(piece) for piece in chosen]
        draws = rng.random(len(chosen) if self.unit is Unit.SPAN else sum(sizes))
        if self.unit is Unit.SPAN:
            draws = np.repeat(draws, sizes)
        positions, masked_ids = np.concatenate(chosen), input_ids.copy()
        mask_share, random_share = self.replace
        masked_ids[positions[draws < mask_share]] = self.mask_id
        changed = positions[(draws >= mask_share) & (draws < mask_share + random_share)]
        masked_ids[changed] = rng.choice(np.flatnonzero(~self.special), len(changed))
        return masked_ids, np.sort(positions)

    def units(self, input_ids: Ids) -> list[Ids]:
        """Return the positions of each token, or of each whole word, in order.

        A span consists of whole words.
        """
        positions = np.flatnonzero(~self.special[input_ids])
        if self.unit is Unit.TOKEN or not len(positions):
            return list(positions[:, None])
        starts = ~self.continues[input_ids[positions]] | (np.diff(positions, prepend=-2) > 1)
        return np.split(positions, np.flatnonzero(starts[1:]) + 1)


def _choose_units(units: list[Ids], count: int, rng: np.random.Generator) -> list[Ids]:
    """Choose units in random order until they have ``count`` tokens.

    A unit that would exceed ``count`` is skipped, unless it is the first.
    """
    chosen: list[Ids] = []
    for index in rng.permutation(len(units)):
        if len(units[index]) <= count or not chosen:
            chosen.append(units[index])
            count -= len(units[index])
        if count <= 0:
            break
    return chosen


def choose_spans(words: list[Ids], count: int, rng: np.random.Generator) -> list[Ids]:
    """Choose spans of 1 to 10 words, with geometric lengths, until they have ``count`` tokens.

    The last span is shortened to the remaining number of tokens.
    """
    taken = np.zeros(len(words), bool)
    chosen: list[Ids] = []
    for _ in range(10 * len(words)):
        if count <= 0:
            break
        length = min(1 + int(rng.choice(_LONGEST_SPAN, p=_SPAN_SHARES)), len(words))
        first = int(rng.integers(len(words) - length + 1))
        while length > 1 and sum(map(len, words[first : first + length])) > count:
            length -= 1
        span = slice(first, first + length)
        positions = np.concatenate(words[span])
        # The [SEP] between two texts is a boundary.
        crosses_special = positions[-1] - positions[0] != len(positions) - 1
        if not taken[span].any() and not crosses_special and len(positions) <= count:
            taken[span] = True
            chosen.append(positions)
            count -= len(positions)
    return chosen or [words[rng.integers(len(words))]]


_WITHOUT_SPACES = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""A character of a script without spaces: Thai, Lao, Burmese, Khmer, Japanese or Chinese."""


def make_masking(
    text: Tokenizer,
    mask_id: int | None,
    unit: Unit = Unit.TOKEN,
    replace: tuple[float, float] = (0.8, 0.1),
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
    return Masking(unit, mask_id, special, continuations(text), replace)


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
