"""Texts with labels and sentences with tags as a model reads them, and the figures of its logits.

Shapes: N texts, L labels of one set, S tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from cloze.export.errors import DataError
from cloze.export.measure.labelled import OUTSIDE, LabelledText, Row, TaggedSentence
from cloze.export.measure.metrics import classification, entity_tags, multi_label, regression
from cloze.model_store.heads.label_sets import LabelSet
from cloze.model_store.heads.sequence_classification import SequenceLabelSet
from cloze.model_store.heads.token_classification import as_iob2
from cloze.model_store.sequences import without_space

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A text, a pair or a sentence as a model reads it.

    Attributes:
        input_ids: int64 [S].
        token_type_ids: int64 [S].
        word_of: int64 [S], the number of each token's word in a sentence; -1 outside of words, and
            for texts.
    """

    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    word_of: NDArray[np.int64]

    def first_tokens(self) -> NDArray[np.int64]:
        """Return the index of the first token of each word that has one."""
        before = np.concatenate([[-1], self.word_of[:-1]])
        return np.flatnonzero((self.word_of >= 0) & (self.word_of != before))


def encode_rows(
    rows: Sequence[Row], text: Tokenizer, tokens: int, *, cut: bool = True
) -> list[EncodedRow]:
    """Return the sequences of rows of at most ``tokens`` tokens, special tokens included.

    Of a long pair, the longer text is cut. Without ``cut``, a longer text is an error.

    Raises:
        DataError: a text is too long and must not be cut, or has no token.
    """
    sources = [row.text if row.text_pair is None else (row.text, row.text_pair) for row in rows]
    text.enable_truncation(tokens)
    encodings = text.encode_batch(sources)
    text.no_truncation()
    for row, source, encoding in zip(rows, sources, encodings, strict=True):
        if encoding.overflowing and not cut:
            raise DataError(
                f"{row.at}: {row.text[:60]!r} has {len(text.encode_batch([source])[0])} tokens, "
                f'the limit is {tokens}; shorten it, or set long_text = "truncate"'
            )
        if 0 not in encoding.sequence_ids:
            raise DataError(f"{row.at}: {row.text[:60]!r} has no token of the vocabulary")
    return [_row(row, encoding) for row, encoding in zip(rows, encodings, strict=True)]


def _row(row: Row, encoding: Encoding) -> EncodedRow:
    word_of = np.full(len(encoding.ids), -1)
    if isinstance(row, TaggedSentence):
        ends = np.cumsum([len(word) + 1 for word in row.words])
        is_text = np.array([number == 0 for number in encoding.sequence_ids])
        starts = np.array(without_space(row.text, encoding.offsets))[:, 0]
        word_of[is_text] = np.searchsorted(ends, starts[is_text], "right")
    ids, types = (np.array(each, np.int64) for each in (encoding.ids, encoding.type_ids))
    return EncodedRow(ids, types, word_of)


def label_matrix(rows: Sequence[LabelledText], labels: Sequence[str]) -> NDArray[np.bool_]:
    """Return bool [N, L], whether each row has each label."""
    return np.array([[label in row.names for label in labels] for row in rows], bool)


def measure_labels(
    rows: Sequence[LabelledText], logits: Sequence[Floats], labels: SequenceLabelSet
) -> dict[str, float]:
    """Return the figures of a label set on texts, from the logits [L] of each."""
    scores = np.stack(logits)
    match labels.problem_type:
        case "regression":
            return regression(scores[:, 0], np.array([row.label for row in rows], np.float64))
        case "multi_label_classification":
            return multi_label(scores, label_matrix(rows, labels.labels))
        case "single_label_classification":
            return classification(scores, label_matrix(rows, labels.labels).argmax(1))


def measure_tags(
    rows: Sequence[TaggedSentence],
    encoded: Sequence[EncodedRow],
    logits: Sequence[Floats],
    labels: LabelSet,
) -> dict[str, float]:
    """Return precision, recall and F1 of entities, and the share of right tags.

    The first token of a word decides its tag. A word that is cut off, or has no token, is outside.

    Args:
        logits: [S, L] of each row.
    """
    predicted: list[Sequence[str]] = []
    for row, sequence, scores in zip(rows, encoded, logits, strict=True):
        tags = [OUTSIDE] * len(row.words)
        for token in sequence.first_tokens():
            tags[sequence.word_of[token]] = labels.labels[scores[token].argmax()]
        predicted.append(as_iob2(tags, labels.labels))
    return entity_tags(predicted, [row.tags for row in rows])
