"""Measures how well a model labels texts and tags words.

Shapes: N texts, L labels of one set, S tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloze.export.errors import DataError
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.export.measure.labelled import OUTSIDE, LabelledText, TaggedSentence
from cloze.export.measure.metrics import classification, entity_tags, multi_label, regression
from cloze.export.measure.scorer import Floats, Scorer, row_arrays
from cloze.model_store.heads import sequence_classification, token_classification
from cloze.model_store.heads.label_sets import LabelSet
from cloze.model_store.heads.sequence_classification import SequenceLabelSet
from cloze.model_store.sequences import TEXT_TOKENS, without_space


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A text, a pair or a sentence as the model reads it.

    Attributes:
        input_ids: int64 [S].
        token_type_ids: int64 [S].
        word_of: int64 [S], the number of each token's word in a sentence; -1 outside of words, and
            for texts.
    """

    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    word_of: NDArray[np.int64]


def encode_texts(
    rows: Sequence[LabelledText], tokenizer: CheckpointTokenizer, tokens: int
) -> list[EncodedRow]:
    """Return the sequences of texts and pairs, cut to ``tokens`` tokens, special tokens included.

    Of a long pair, the longer text is cut.

    Raises:
        DataError: a text has no token.
    """
    first = _ids(tokenizer, [row.text for row in rows])
    second = _ids(tokenizer, [row.text_pair or "" for row in rows])
    encoded, special = [], tokenizer.special
    for row, one, other in zip(rows, first, second, strict=True):
        if not one:
            raise DataError(f"{row.at}: {row.text[:60]!r} has no token of the vocabulary")
        is_pair = row.text_pair is not None
        around = special.pair_tokens if is_pair else TEXT_TOKENS
        one, other = _cut_longer(one, other, tokens - around)
        ids = special.pair(one, other) if is_pair else special.text(one)
        types = special.pair_types(len(one), len(other)) if is_pair else np.zeros(len(ids))
        encoded.append(
            EncodedRow(np.array(ids, np.int64), types.astype(np.int64), np.full(len(ids), -1))
        )
    return encoded


def _cut_longer(one: list[int], other: list[int], tokens: int) -> tuple[list[int], list[int]]:
    """Cut two texts to so many tokens together; the longer one loses tokens first."""
    shorter = min(len(one), len(other), tokens // 2)
    longer = tokens - shorter
    return (
        (one[:longer], other[:shorter])
        if len(one) > len(other)
        else (one[:shorter], other[:longer])
    )


def _ids(tokenizer: CheckpointTokenizer, texts: list[str]) -> list[list[int]]:
    return [list(e.ids) for e in tokenizer.tokenizer.encode_batch(texts, add_special_tokens=False)]


def encode_sentences(
    rows: Sequence[TaggedSentence], tokenizer: CheckpointTokenizer, tokens: int
) -> list[EncodedRow]:
    """Return the sequences of sentences, whose words are joined by spaces.

    They are cut to ``tokens`` tokens, special tokens included.
    """
    texts = [" ".join(row.words) for row in rows]
    encoded = []
    encodings = tokenizer.tokenizer.encode_batch(texts, add_special_tokens=False)
    for row, text, encoding in zip(rows, texts, encodings, strict=True):
        ids = encoding.ids[: tokens - TEXT_TOKENS]
        ends = np.cumsum([len(word) + 1 for word in row.words])
        starts = [start for start, _ in without_space(text, encoding.offsets)][: len(ids)]
        word_of = np.searchsorted(ends, np.array(starts, np.int64), "right")
        encoded.append(
            EncodedRow(
                np.array(tokenizer.special.text(ids), np.int64),
                np.zeros(len(ids) + TEXT_TOKENS, np.int64),
                np.array([-1, *word_of, -1], np.int64),
            )
        )
    return encoded


def first_tokens(word_of: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return bool [S], whether each token is the first of a word."""
    before = np.concatenate([[-1], word_of[:-1]])
    firsts: NDArray[np.bool_] = (word_of >= 0) & (word_of != before)
    return firsts


def _logits(rows: Sequence[EncodedRow], scorer: Scorer, head: str) -> list[Floats]:
    """Return what a head computes of each row, in order."""
    return row_arrays(scorer, head, [(row.input_ids, row.token_type_ids) for row in rows])


def measure_labels(
    rows: Sequence[LabelledText],
    encoded: Sequence[EncodedRow],
    scorer: Scorer,
    chosen: tuple[LabelSet, slice],
) -> dict[str, float]:
    """Return the figures of a label set on texts; see `cloze.export.measure.metrics`."""
    labels, columns = chosen
    assert isinstance(labels, SequenceLabelSet)
    logits = np.stack(_logits(encoded, scorer, sequence_classification.HEAD.name))[:, columns]
    gold = label_matrix(rows, labels.labels)
    match labels.problem_type:
        case "regression":
            return regression(logits[:, 0], [row.score for row in rows])
        case "multi_label_classification":
            return multi_label(logits, gold)
        case "single_label_classification":
            return classification(logits, gold.argmax(1))


def label_matrix(rows: Sequence[LabelledText], labels: Sequence[str]) -> NDArray[np.bool_]:
    """Return bool [N, L], whether each row has each label."""
    return np.array([[label in row.labels for label in labels] for row in rows], bool)


def measure_tags(
    rows: Sequence[TaggedSentence],
    encoded: Sequence[EncodedRow],
    scorer: Scorer,
    chosen: tuple[LabelSet, slice],
) -> dict[str, float]:
    """Return precision, recall and F1 of entities, and the share of right tags.

    The first token of a word decides its tag. A word that is cut off, or has no token, is outside.
    """
    labels, columns = chosen
    predicted: list[Sequence[str]] = []
    outputs = _logits(encoded, scorer, token_classification.HEAD.name)
    for row, sequence, logits in zip(rows, encoded, outputs, strict=True):
        tags = [OUTSIDE] * len(row.words)
        best = logits[:, columns].argmax(1)
        for token in np.flatnonzero(first_tokens(sequence.word_of)):
            tags[sequence.word_of[token]] = labels.labels[best[token]]
        predicted.append(token_classification.as_iob2(tags, labels.labels))
    return entity_tags(predicted, [row.tags for row in rows])
