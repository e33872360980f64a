"""Measures which of two sentences a masked language model finds likelier: a stereotype, or not.

Three computations, each on minimal pairs, whose sentences differ in a few words:

- CrowS-Pairs (Nangia et al. 2020): mask in turn each token that both sentences share, and add the
  log probabilities.
- StereoSet, sentences (Nadeem et al. 2021): the mean probability of the pieces of the word in
  which three sentences differ, each piece at a mask after the pieces before it.
- Pseudo-log-likelihood (Salazar et al. 2020), as ``/score`` computes it: mask in turn each token.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloze.export.errors import DataError, ExportError
from cloze.export.evaluation.data_files import read_objects, read_text
from cloze.export.evaluation.scorer import Scorer, equal_lengths, score_masks
from cloze.export.load.tokenizer import CheckpointTokenizer

_BATCH = 64  # masked sequences per run


@dataclass(frozen=True, slots=True)
class SentencePair:
    """Two sentences that differ in a few words.

    Attributes:
        more: the sentence that agrees with a stereotype.
        kind: kind of the stereotype; "" if the file names none.
    """

    more: str
    less: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Triple:
    """Three sentences that differ in one place; ``unrelated`` has a meaningless word there."""

    stereotype: str
    anti_stereotype: str
    unrelated: str


@dataclass(frozen=True, slots=True)
class MaskedModel:
    """A masked language model with its tokenizer.

    Attributes:
        max_tokens: the longest sequence; longer sentences are truncated.

    Raises:
        ExportError: the tokenizer has no mask token.
    """

    scorer: Scorer
    tokenizer: CheckpointTokenizer
    max_tokens: int

    def __post_init__(self) -> None:
        if self.tokenizer.mask_id is None:
            raise ExportError("the tokenizer has no mask token, which the sentences need")

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text with its special tokens."""
        encoded = self.tokenizer.tokenizer.encode_batch(list(texts))
        return [encoding.ids[: self.max_tokens] for encoding in encoded]

    def log_probabilities(self, masks: Sequence[tuple[Sequence[int], int]]) -> NDArray[np.float64]:
        """Return the log probability [M] of a token at a mask in its place, for each (ids, place).

        Args:
            masks: the ids of a sequence, and the position of the token.
        """
        mask_id = self.tokenizer.mask_id
        assert mask_id is not None
        values = np.zeros(len(masks))
        for group in equal_lengths([len(ids) for ids, _ in masks], _BATCH):
            ids = np.asarray([masks[index][0] for index in group], np.int64)
            positions = np.asarray([masks[index][1] for index in group], np.int64)
            rows = np.arange(len(ids))
            labels = ids[rows, positions]
            ids[rows, positions] = mask_id
            flat = positions + rows * ids.shape[1]
            _, values[group] = score_masks(self.scorer, ids, np.zeros_like(ids), flat, labels, k=1)
        return values


def crows_scores(pairs: Sequence[SentencePair], model: MaskedModel) -> NDArray[np.float64]:
    """Return the scores [N, 2] of the sentences of each pair: their shared tokens' sums."""
    sentences = [model.ids((pair.more, pair.less)) for pair in pairs]
    places = [
        (number, side, position)
        for number, (more, less) in enumerate(sentences)
        for side, position in _shared_tokens(more, less)
    ]
    return _sums(sentences, places, model)


def text_scores(pairs: Sequence[SentencePair], model: MaskedModel) -> NDArray[np.float64]:
    """Return the pseudo-log-likelihoods [N, 2] of the sentences of each pair."""
    sentences = [model.ids((pair.more, pair.less)) for pair in pairs]
    places = [
        (number, side, position)
        for number, both in enumerate(sentences)
        for side, ids in enumerate(both)
        for position in range(1, len(ids) - 1)
    ]
    return _sums(sentences, places, model)


def _sums(
    sentences: Sequence[Sequence[Sequence[int]]],
    places: Sequence[tuple[int, int, int]],
    model: MaskedModel,
) -> NDArray[np.float64]:
    values = model.log_probabilities(
        [(sentences[number][side], position) for number, side, position in places]
    )
    scores = np.zeros((len(sentences), 2))
    for (number, side, _), value in zip(places, values, strict=True):
        scores[number, side] += value
    return scores


def _shared_tokens(more: Sequence[int], less: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (side, position) of the tokens that both sentences share; not the special tokens."""
    for block in SequenceMatcher(None, more, less, autojunk=False).get_matching_blocks():
        for offset in range(block.size):
            first, second = block.a + offset, block.b + offset
            if 0 < first < len(more) - 1 and 0 < second < len(less) - 1:
                yield from ((0, first), (1, second))


def stereoset_scores(triples: Sequence[Triple], model: MaskedModel) -> NDArray[np.float64]:
    """Return the scores [N, 3] of the sentences of each triple, in [0, 1]."""
    masks, owners = [], []
    for number, triple in enumerate(triples):
        texts = (triple.stereotype, triple.anti_stereotype, triple.unrelated)
        for side, (text, place) in enumerate(zip(texts, differing(texts), strict=True)):
            for mask in _piece_masks(text, place, model):
                masks.append(mask)
                owners.append(number * 3 + side)
    sums, counts = np.zeros(len(triples) * 3), np.zeros(len(triples) * 3)
    np.add.at(sums, owners, np.exp(model.log_probabilities(masks)))
    np.add.at(counts, owners, 1)
    return (sums / np.maximum(counts, 1)).reshape(-1, 3)


def _piece_masks(
    text: str, place: tuple[int, int], model: MaskedModel
) -> Iterator[tuple[list[int], int]]:
    """Yield the pieces of the characters ``place``, each without the pieces after it."""
    encoding = model.tokenizer.tokenizer.encode(text)
    ids = encoding.ids[: model.max_tokens]
    pieces = [
        position
        for position, (start, end) in enumerate(encoding.offsets[: len(ids)])
        if start < place[1] and end > place[0]
    ]
    for position in pieces:
        yield ids[: position + 1] + ids[pieces[-1] + 1 :], position


def differing(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return for each text the characters (start, end) of the words that the texts do not share.

    The texts share words at their starts and at their ends.
    """
    words = [text.split() for text in texts]
    fewest = min(map(len, words))
    first = 0
    while first < fewest and len({row[first] for row in words}) == 1:
        first += 1
    last = 0
    while last < fewest - first and len({row[-1 - last] for row in words}) == 1:
        last += 1
    places = []
    for text, row in zip(texts, words, strict=True):
        starts, at = [], 0
        for word in row:
            at = text.index(word, at)
            starts.append((at, at + len(word)))
            at += len(word)
        own = starts[first : len(row) - last]
        places.append((own[0][0], own[-1][1]) if own else (0, 0))
    return places


def stereotype_preference(
    pairs: Sequence[SentencePair],
    tokenizer: CheckpointTokenizer,
    scorer: Scorer,
    max_tokens: int,
) -> float:
    """Return the share of CrowS-Pairs whose more stereotyping sentence scores higher, in [0, 1].

    Equal scores count as half a pair.

    Args:
        max_tokens: the longest sequence; longer sentences are truncated.

    Raises:
        ExportError: the tokenizer has no mask token.
    """
    scores = crows_scores(pairs, MaskedModel(scorer, tokenizer, max_tokens))
    return float(preferences(scores[:, 0], scores[:, 1]).mean())


def preferences(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 where the first score is higher, 0 where the second is, 0.5 if they are equal."""
    return (np.sign(first - second) + 1) / 2


# ---- files -------------------------------------------------------------------------------------


def read_stereotypes(file: Path) -> list[SentencePair]:
    """Read a CSV file of CrowS-Pairs: columns ``sent_more``, ``sent_less``, perhaps ``bias_type``.

    Raises:
        DataError: the file is missing, is not such a file, or a row lacks a sentence.
    """
    try:
        rows = csv.DictReader(io.StringIO(read_text(file), newline=""), strict=True)
        pairs = []
        for row in rows:
            more, less = row["sent_more"], row["sent_less"]
            if not (more or "").strip() or not (less or "").strip() or more == less:
                raise DataError(
                    f"{file}, line {rows.line_num}: two different sentences are expected, "
                    f"got {more!r:.80} and {less!r:.80}"
                )
            pairs.append(SentencePair(more, less, row.get("bias_type") or ""))
    except (KeyError, csv.Error) as error:
        raise DataError(
            f"{file} is not in CrowS-Pairs' format (columns sent_more, sent_less): {error}"
        ) from error
    if not pairs:
        raise DataError(f"{file} holds no pairs")
    return pairs


def read_minimal_pairs(file: Path) -> list[SentencePair]:
    """Read JSON lines with ``stereotype``, ``anti_stereotype`` and perhaps ``type``.

    The brackets of WinoBias, which mark a pronoun and whom it means, are removed.

    Raises:
        DataError: the file is missing, or a line is not such a pair.
    """
    pairs = []
    for line, row in read_objects(file):
        more, less = (
            _sentence(row, name, line).replace("[", "").replace("]", "")
            for name in ("stereotype", "anti_stereotype")
        )
        if more == less:
            raise DataError(f"{line}: both sentences are {more!r:.80}")
        pairs.append(SentencePair(more, less, str(row.get("type", ""))))
    return pairs


def read_stereoset(file: Path) -> list[Triple]:
    """Read JSON lines with ``stereotype``, ``anti_stereotype`` and ``unrelated``.

    Raises:
        DataError: the file is missing, or a line does not hold three sentences that differ in one
            place.
    """
    triples = []
    for line, row in read_objects(file):
        texts = [_sentence(row, name, line) for name in Triple.__slots__]
        empty = [
            text for text, (start, end) in zip(texts, differing(texts), strict=True) if start == end
        ]
        if empty:
            raise DataError(
                f"{line}: three sentences that differ in one place are expected, "
                f"got {empty[0]!r:.80}"
            )
        triples.append(Triple(*texts))
    return triples


def _sentence(row: dict[str, Any], name: str, line: str) -> str:
    text = row.get(name)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{line}: {name} must be a sentence, got {text!r:.80}")
    return text
