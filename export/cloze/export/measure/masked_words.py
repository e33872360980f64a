"""Measures a masked language model on sentences with known answers.

A file of sentences has one per line, a tab, and the accepted words separated by commas:

    I drink a cup of [MASK] in the morning.<TAB>coffee,tea
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cloze.export.errors import DataError
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.export.measure.data_files import read_lines
from cloze.export.measure.scorer import MaskedRow, Scorer, score_masks

_MASK_TOKEN = "[MASK]"
"""The mark of the mask in a file, whatever the tokenizer's mask token is."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence with one mask.

    Attributes:
        words: the accepted words, in lower case.
    """

    text: str
    words: tuple[str, ...]

    def accepts(self, word: str) -> bool:
        """Return whether a word is accepted."""
        return word.lower() in self.words

    def is_repeated_by(self, word: str) -> bool:
        """Return whether a word is not accepted, and stands in the sentence already."""
        return not self.accepts(word) and word.lower() in re.findall(r"\w+", self.text.lower())


def read_sentences(file: Path) -> list[Sentence]:
    """Read sentences.

    Raises:
        DataError: the file is missing, or a line has no tab, no word, or not one mask.
    """
    sentences = []
    for number, line in enumerate(read_lines(file), 1):
        text, _, words = line.partition("\t")
        accepted = tuple(word.strip().lower() for word in words.split(",") if word.strip())
        if text.count(_MASK_TOKEN) != 1 or not accepted:
            raise DataError(
                f"{file}, line {number}: a sentence with one {_MASK_TOKEN}, a tab, and words are "
                f"expected, got {line.strip()!r:.80}"
            )
        sentences.append(Sentence(text, accepted))
    if not sentences:
        raise DataError(f"{file} holds no sentences")
    return sentences


def complete(
    sentences: Sequence[Sentence], tokenizer: CheckpointTokenizer, scorer: Scorer
) -> list[str]:
    """Return the model's first word for each sentence.

    Raises:
        DataError: the tokenizer has no mask token.
    """
    if tokenizer.mask_token is None:
        raise DataError("the tokenizer has no mask token")
    mask_id, rows = tokenizer.mask_id, []
    for sentence in sentences:
        text = sentence.text.replace(_MASK_TOKEN, tokenizer.mask_token)
        ids = np.array(tokenizer.tokenizer.encode(text).ids, np.int64)
        position = np.flatnonzero(ids == mask_id)
        rows.append(MaskedRow(ids, np.zeros_like(ids), position, ids[position]))
    return [tokenizer.readable([int(best[0, 0])]) for best, _ in score_masks(scorer, rows, k=1)]
