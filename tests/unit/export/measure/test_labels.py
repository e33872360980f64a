"""Texts and tags as a model reads them, and which logits of it count."""

import numpy as np
import pytest

from cloze.export.errors import DataError
from cloze.export.measure.labelled import LabelledText, TaggedSentence
from cloze.export.measure.labels import (
    encode_sentences,
    encode_texts,
    first_tokens,
    measure_labels,
    measure_tags,
)
from cloze.model_store.batch import Encoding
from cloze.model_store.heads import ArrayResult
from cloze.model_store.heads.label_sets import LabelSet
from cloze.model_store.heads.sequence_classification import SequenceLabelSet
from tests.unit.export.scorers import CLS, ID, SEP, ByHand, checkpoint_tokenizer

TOKENIZER = checkpoint_tokenizer()
WORDS = [ID[word] for word in ("the", "king", "of", "door", "is")]
THE, KING, OF, DOOR, IS = WORDS


def text(first: str, second: str | None = None, labels: tuple[str, ...] = ()) -> LabelledText:
    return LabelledText(first, second, labels, 0.0, "file, line 1")


def ids(tokens: int, first: str, second: str | None = None) -> list[int]:
    [row] = encode_texts([text(first, second)], TOKENIZER, tokens)
    assert len(row.input_ids) == len(row.token_type_ids) == len(row.word_of)
    return row.input_ids.tolist()


def test_the_longer_text_of_a_pair_is_cut() -> None:
    short, long = "the king", "the king of the door"
    cut = 8
    assert ids(cut, long, short) == [CLS, THE, KING, OF, SEP, THE, KING, SEP]
    assert ids(cut, short, long) == [CLS, THE, KING, SEP, THE, KING, OF, SEP]
    assert ids(7, long, long) == [CLS, THE, KING, SEP, THE, KING, SEP]
    assert ids(5, long) == [CLS, THE, KING, OF, SEP]
    [row] = encode_texts([text(short, long)], TOKENIZER, cut)
    assert row.token_type_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert set(row.word_of) == {-1}


def test_a_text_without_a_token_is_an_error() -> None:
    with pytest.raises(DataError, match="has no token of the vocabulary"):
        ids(5, "\u200b")


def test_each_token_belongs_to_the_word_that_it_begins_in() -> None:
    words = ("The", "king's", "door", "\u200b", "is")  # the fourth has no token
    sentence = TaggedSentence(words, ("O",) * 5, "at")
    [row] = encode_sentences([sentence], TOKENIZER, 20)
    tokens = [TOKENIZER.tokenizer.id_to_token(number) for number in row.input_ids]
    assert tokens[:3] == ["[CLS]", "the", "king"]
    assert tokens[-3:] == ["door", "is", "[SEP]"]
    inner = len(tokens) - 5
    assert row.word_of.tolist() == [-1, 0, *[1] * inner, 2, 4, -1]
    firsts = first_tokens(row.word_of).tolist()
    assert firsts == [False, True, True, *[False] * (inner - 1), True, True, False]
    [cut] = encode_sentences([sentence], TOKENIZER, 4)
    assert cut.word_of.tolist() == [-1, 0, 1, -1]


# ---- figures: the set that is measured has the last columns of the classifier -------------------

COLUMNS = slice(2, 5)


def scorer(head: str, by_word: dict[int, list[float]], *, of_tokens: bool = False) -> ByHand:
    """Give a sequence the logits of its second token, or each token its own, after two others."""

    def result(encoding: Encoding) -> dict[str, ArrayResult]:
        rows = [[9.0, 8.0, *by_word.get(int(n), [0.0] * 3)] for n in encoding.input_ids]
        logits = np.array(rows, np.float32)
        return {head: ArrayResult(logits if of_tokens else logits[1])}

    return ByHand(result)


def test_only_the_columns_of_the_set_are_read() -> None:
    labels = SequenceLabelSet(
        name="one", labels=("a", "b", "c"), problem_type="single_label_classification"
    )
    by_word = {KING: [1.0, 3.0, 2.0], DOOR: [0.0, 1.0, 4.0]}
    rows = [text("king", labels=("b",)), text("door", labels=("c",)), text("door", labels=("a",))]
    encoded = encode_texts(rows, TOKENIZER, 8)
    made = scorer("sequence_classification", by_word)
    figures = measure_labels(rows, encoded, made, (labels, COLUMNS))
    assert figures["accuracy"] == pytest.approx(2 / 3)


def test_a_label_is_there_if_its_logit_is_above_0() -> None:
    labels = SequenceLabelSet(
        name="one", labels=("a", "b", "c"), problem_type="multi_label_classification"
    )
    rows = [text("king", labels=("a", "c")), text("door")]
    encoded = encode_texts(rows, TOKENIZER, 8)
    by_word = {KING: [0.1, -0.1, 2.0], DOOR: [-0.1, 0.0, -3.0]}
    figures = measure_labels(
        rows, encoded, scorer("sequence_classification", by_word), (labels, COLUMNS)
    )
    assert set(figures.values()) == {1.0}


def test_the_first_token_of_a_word_decides_its_tag() -> None:
    labels = LabelSet(name="one", labels=("O", "B-X", "I-X"))
    by_word = {THE: [1.0, 0.0, 0.0], KING: [0.0, 1.0, 0.0], DOOR: [0.0, 0.5, 1.0]}
    row = TaggedSentence(("the", "kings", "door", "door"), ("O", "B-X", "I-X", "I-X"), "at")
    cut = len(TOKENIZER.tokenizer.encode("the kings door").ids)
    encoded = encode_sentences([row], TOKENIZER, cut)
    made = scorer("token_classification", by_word, of_tokens=True)
    figures = measure_tags([row], encoded, made, (labels, COLUMNS))
    assert figures["accuracy"] == 3 / 4, "the word that is cut off is outside"
    assert figures["entity_f1"] == 0.0


def test_tags_that_mark_ends_are_compared_with_those_of_the_data() -> None:
    labels = LabelSet(name="one", labels=("O", "B-X", "E-X"))
    by_word = {THE: [1.0, 0.0, 0.0], KING: [0.0, 1.0, 0.0], DOOR: [0.0, 0.5, 1.0]}
    row = TaggedSentence(("the", "king", "door"), ("O", "B-X", "I-X"), "at")
    encoded = encode_sentences([row], TOKENIZER, 9)
    made = scorer("token_classification", by_word, of_tokens=True)
    figures = measure_tags([row], encoded, made, (labels, COLUMNS))
    assert set(figures.values()) == {1.0}
