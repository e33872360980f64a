"""Texts and tags as a model reads them, and which logits of it count."""

import numpy as np
import pytest

from cloze.export.errors import DataError
from cloze.export.measure.labelled import (
    EncodedRow,
    Floats,
    LabelledText,
    TaggedSentence,
    encode_rows,
    measure_labels,
    measure_tags,
)
from cloze.model_store.heads.label_sets import LabelSet
from cloze.model_store.heads.sequence_classification import SequenceLabelSet
from tests.support.scorers import CLS, ID, SEP, tokenizer

TOKENIZER = tokenizer()
WORDS = [ID[word] for word in ("the", "king", "of", "door", "is")]
THE, KING, OF, DOOR, IS = WORDS


def text(first: str, second: str | None = None, labels: tuple[str, ...] = ()) -> LabelledText:
    return LabelledText(first, second, labels=labels, at="file, line 1")


def ids(tokens: int, first: str, second: str | None = None) -> list[int]:
    [row] = encode_rows([text(first, second)], TOKENIZER, tokens)
    assert len(row.input_ids) == len(row.token_type_ids) == len(row.word_of)
    return row.input_ids.tolist()


def test_the_longer_text_of_a_pair_is_cut() -> None:
    short, long = "the king", "the king of the door"
    cut = 8
    assert ids(cut, long, short) == [CLS, THE, KING, OF, SEP, THE, KING, SEP]
    assert ids(cut, short, long) == [CLS, THE, KING, SEP, THE, KING, OF, SEP]
    assert ids(7, long, long) == [CLS, THE, KING, SEP, THE, KING, SEP]
    assert ids(5, long) == [CLS, THE, KING, OF, SEP]
    [row] = encode_rows([text(short, long)], TOKENIZER, cut)
    assert row.token_type_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert set(row.word_of) == {-1}


def test_a_text_without_a_token_is_an_error() -> None:
    with pytest.raises(DataError, match="has no token of the vocabulary"):
        ids(5, "\u200b")


def test_each_token_belongs_to_the_word_that_it_begins_in() -> None:
    words = ("The", "king's", "door", "\u200b", "is")  # the fourth has no token
    sentence = TaggedSentence(words, ("O",) * 5, "at")
    [row] = encode_rows([sentence], TOKENIZER, 20)
    tokens = [TOKENIZER.id_to_token(number) for number in row.input_ids]
    assert tokens[:3] == ["[CLS]", "the", "king"]
    assert tokens[-3:] == ["door", "is", "[SEP]"]
    inner = len(tokens) - 5
    assert row.word_of.tolist() == [-1, 0, *[1] * inner, 2, 4, -1]
    assert row.first_tokens().tolist() == [1, 2, inner + 2, inner + 3]
    [cut] = encode_rows([sentence], TOKENIZER, 4)
    assert cut.word_of.tolist() == [-1, 0, 1, -1]


# ---- figures


def logits(encoded: list[EncodedRow], by_word: dict[int, list[float]]) -> list[Floats]:
    """Return the logits [S, 3] of tokens."""
    return [
        np.array([by_word.get(int(n), [0.0] * 3) for n in row.input_ids], np.float32)
        for row in encoded
    ]


def test_the_highest_logit_is_the_label() -> None:
    labels = SequenceLabelSet(labels=("a", "b", "c"), problem_type="single_label_classification")
    rows = [text("king", labels=("b",)), text("door", labels=("c",)), text("door", labels=("a",))]
    given = [np.array(each, np.float32) for each in ([1, 3, 2], [0, 1, 4], [0, 1, 4])]
    assert measure_labels(rows, given, labels)["accuracy"] == pytest.approx(2 / 3)


def test_a_label_is_there_if_its_logit_is_above_0() -> None:
    labels = SequenceLabelSet(labels=("a", "b", "c"), problem_type="multi_label_classification")
    rows = [text("king", labels=("a", "c")), text("door")]
    given = [np.array(each, np.float32) for each in ([0.1, -0.1, 2.0], [-0.1, 0.0, -3.0])]
    assert set(measure_labels(rows, given, labels).values()) == {1.0}


def test_the_first_token_of_a_word_decides_its_tag() -> None:
    labels = LabelSet(labels=("O", "B-X", "I-X"))
    by_word = {THE: [1.0, 0.0, 0.0], KING: [0.0, 1.0, 0.0], DOOR: [0.0, 0.5, 1.0]}
    row = TaggedSentence(("the", "kings", "door", "door"), ("O", "B-X", "I-X", "I-X"), "at")
    encoded = encode_rows([row], TOKENIZER, len(TOKENIZER.encode("the kings door").ids))
    figures = measure_tags([row], encoded, logits(encoded, by_word), labels)
    assert figures["accuracy"] == 3 / 4, "the word that is cut off is outside"
    assert figures["entity_f1"] == 0.0
