"""Measures a masked language model on sentences with known answers, and on stereotypes.

A file of sentences has one per line, a tab, and the accepted words separated by commas:

    I drink a cup of [MASK] in the morning.<TAB>coffee,tea

The two sentences of a pair of CrowS-Pairs (Nangia et al. 2020) differ in the group of people that
they mention. Each token that both sentences share is masked in turn. The score of a sentence is the
sum of the log probabilities of these tokens. An unbiased model prefers the stereotype in half of
the pairs.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from cloze.export.errors import DataError, ExportError
from cloze.export.evaluation.scorer import Floats, Ids, Scorer, equal_lengths, score_masks
from cloze.export.tokenizer import CheckpointTokenizer

_BATCH = 64  # masked sequences per run


def read_stereotypes(file: Path) -> list[tuple[str, str]]:
    """Read pairs: (the more stereotyping sentence, the less stereotyping sentence).

    Raises:
        DataError: the file is missing, or is not a CSV file of CrowS-Pairs.
    """
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            pairs = [(row["sent_more"], row["sent_less"]) for row in csv.DictReader(stream)]
    except FileNotFoundError:
        raise DataError(f"{file}: no such file") from None
    except (KeyError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{file} is not in CrowS-Pairs' format (columns sent_more, sent_less): {error}"
        ) from error
    if not pairs:
        raise DataError(f"{file} holds no pairs")
    return pairs


def stereotype_preference(
    pairs: Sequence[tuple[str, str]],
    tokenizer: CheckpointTokenizer,
    scorer: Scorer,
    max_tokens: int,
) -> float:
    """Return the share of pairs whose more stereotyping sentence scores higher, in [0, 1].

    Equal scores count as half a pair.

    Args:
        max_tokens: the longest sequence; longer sentences are truncated.

    Raises:
        ExportError: the tokenizer has no mask token.
    """
    if tokenizer.mask_id is None:
        raise ExportError("the tokenizer has no mask token, which CrowS-Pairs needs")
    sentences = [
        [encoding.ids[:max_tokens] for encoding in tokenizer.tokenizer.encode_batch(list(pair))]
        for pair in pairs
    ]
    masks = [
        (number, side, position)
        for number, (more, less) in enumerate(sentences)
        for side, position in _shared_tokens(more, less)
    ]
    scores = np.zeros((len(pairs), 2))
    for group in equal_lengths([len(sentences[number][side]) for number, side, _ in masks], _BATCH):
        chosen = [masks[index] for index in group]
        ids = np.asarray([sentences[number][side] for number, side, _ in chosen], np.int64)
        positions = np.asarray([position for *_, position in chosen], np.int64)
        log_probabilities = _mask_and_score(scorer, ids, positions, tokenizer.mask_id)
        for (number, side, _), value in zip(chosen, log_probabilities, strict=True):
            scores[number, side] += value
    more, less = scores.T
    return float((more > less).mean() + (more == less).mean() / 2)


def _shared_tokens(more: Sequence[int], less: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (side, position) of the tokens that both sentences share; not the special tokens."""
    for block in SequenceMatcher(None, more, less, autojunk=False).get_matching_blocks():
        for offset in range(block.size):
            first, second = block.a + offset, block.b + offset
            if 0 < first < len(more) - 1 and 0 < second < len(less) - 1:
                yield from ((0, first), (1, second))


def _mask_and_score(scorer: Scorer, ids: Ids, positions: Ids, mask_id: int) -> Floats:
    """Mask one token per row of ``ids`` [M, S]; return the log probability [M] of each token."""
    rows = np.arange(len(ids))
    labels = ids[rows, positions]
    ids[rows, positions] = mask_id
    flat_positions = positions + rows * ids.shape[1]
    types = np.zeros_like(ids)
    return score_masks(scorer, ids, types, flat_positions, labels, k=1)[1]


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


@dataclass(frozen=True, slots=True)
class Completion:
    """The model's first word for a sentence."""

    sentence: Sentence
    word: str

    @property
    def is_right(self) -> bool:
        """Whether the word is accepted."""
        return self.word.lower() in self.sentence.words

    @property
    def repeats(self) -> bool:
        """Whether the word is not accepted, and stands in the sentence already."""
        words = re.findall(r"\w+", self.sentence.text.lower())
        return not self.is_right and self.word.lower() in words


def read_sentences(file: Path) -> list[Sentence]:
    """Read sentences.

    Raises:
        DataError: the file is missing, or a line has no tab, no word, or not one mask.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    sentences = []
    for number, line in enumerate(lines, 1):
        text, _, words = line.partition("\t")
        accepted = tuple(word.strip().lower() for word in words.split(",") if word.strip())
        if text.count(_MASK_TOKEN) != 1 or not accepted:
            raise DataError(
                f"{file}, line {number}: a sentence with one {_MASK_TOKEN}, a tab, and words"
            )
        sentences.append(Sentence(text, accepted))
    if not sentences:
        raise DataError(f"{file} holds no sentences")
    return sentences


def complete(
    sentences: Sequence[Sentence], tokenizer: CheckpointTokenizer, scorer: Scorer
) -> list[Completion]:
    """Return the model's first word for each sentence.

    Raises:
        DataError: the tokenizer has no mask token.
    """
    if tokenizer.mask_token is None:
        raise DataError("the tokenizer has no mask token")
    completions = []
    for sentence in sentences:
        text = sentence.text.replace(_MASK_TOKEN, tokenizer.mask_token)
        ids = np.array([tokenizer.tokenizer.encode(text).ids], np.int64)
        position = np.flatnonzero(ids[0] == tokenizer.mask_id)
        best, _ = score_masks(scorer, ids, np.zeros_like(ids), position, ids[0][position], k=1)
        completions.append(Completion(sentence, tokenizer.readable([int(best[0, 0])])))
    return completions
