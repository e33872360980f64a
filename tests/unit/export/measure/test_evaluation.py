"""Figures of evaluations, from models whose answers are known."""

import csv
import json
import lzma
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from cloze.export.measure.evaluate import Sentence, read_sentences
from cloze.export.measure.metrics import best_threshold
from cloze.export.measure.pairs import ScoredPair, read_pairs, similarity
from cloze.export.measure.scorer import MaskedRow, score_masks
from cloze.export.measure.squad import Question, read_questions
from cloze.model_store.batch import Encoding
from cloze.model_store.heads import ArrayResult
from cloze.model_store.heads.masked_lm import MaskedLMResult
from tests.support.scorers import CLS, ID, SEP, ByHand, tokenizer


def likely(encoding: Encoding) -> dict[str, Any]:
    """Give a mask at position p the token 10 + p; a target t the log probability -t / 100."""
    request = encoding.requests.get("masked_lm")
    if request is None:
        return {}
    positions, targets = request.positions, np.array(request.targets, np.float32)  # type: ignore[attr-defined]
    count = len(positions)
    best = 10 + np.array(positions)[:, None] + np.arange(request.top_k) * 100  # type: ignore[attr-defined]
    return {
        "masked_lm": MaskedLMResult(
            np.zeros(best.shape, np.float32),
            best,
            np.full(count, 5, np.float32),
            5 - np.tile(targets / 100, (count, 1)),
        )
    }


def test_masks_of_several_sequences_get_their_own_labels() -> None:
    scorer = ByHand(likely)
    rows = [
        MaskedRow(np.array(ids), np.ones(len(ids), np.int64), np.array(at), np.array(labels))
        for ids, at, labels in (
            ([CLS, 5, 6, SEP], [1], [50]),
            ([7, 8, SEP], [0, 1], [60, 70]),
            ([CLS, 9, SEP], [1], [80]),
        )
    ]
    (one, first), (two, second), (three, third) = score_masks(scorer, rows, k=2)
    assert (one.tolist(), two.tolist(), three.tolist()) == (
        [[11, 111]], [[10, 110], [11, 111]], [[11, 111]],
    )  # fmt: skip
    assert [*first, *second, *third] == pytest.approx([-0.5, -0.6, -0.7, -0.8])
    assert [[len(each.input_ids) for each in batch] for batch in scorer.batches] == [[3, 3], [4]]
    assert scorer.encodings[0].token_type_ids.tolist() == [1, 1, 1]


def test_sentences_with_their_words(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("a [MASK]\tRed, blue ,,\nthe [MASK] b\tx\n")
    assert read_sentences(file) == [
        Sentence("a [MASK]", ("red", "blue")),
        Sentence("the [MASK] b", ("x",)),
    ]


def test_a_wrong_word_of_the_sentence_is_a_repetition() -> None:
    sentence = Sentence("The old King has an old [MASK].", ("crown",))
    repeated = [sentence.is_repeated_by(word) for word in ("king", "The", "door", "kin")]
    assert repeated == [True, True, False, False]
    assert not Sentence("a crown is a [MASK]", ("crown",)).is_repeated_by("crown")


def test_pairs_with_their_scores(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.csv", tmp_path / "b.csv.xz"
    with plain.open("w") as stream:
        csv.writer(stream).writerows([["a, b", "c", 1.5], ["d", "e", 2]])
    packed.write_bytes(lzma.compress(b"f,g,0\n"))
    assert read_pairs([plain, packed]) == [
        ScoredPair("a, b", "c", 1.5), ScoredPair("d", "e", 2), ScoredPair("f", "g", 0),
    ]  # fmt: skip


def test_similarity_is_the_rank_correlation_of_cosines() -> None:
    angle = {"the": 0.0, "a": 0.1, "old": 0.5, "king": 0.9, "red": 1.2}
    turned = {ID[word]: value for word, value in angle.items()}

    def embed(encoding: Encoding) -> dict[str, Any]:
        turn = sum(turned[i] for i in encoding.input_ids.tolist() if i in turned)
        return {
            "embedding": ArrayResult(3 * np.array([math.cos(turn), math.sin(turn)], np.float32))
        }

    cases = [("the", "a", 5.0), ("the", "old a", 3.0), ("a", "king", 4.0), ("the", "red", 1.0)]
    cosines = [math.cos(0.1), math.cos(0.6), math.cos(0.8), math.cos(1.2)]
    expected = spearmanr(cosines, [score for *_, score in cases]).statistic
    measured = similarity([ScoredPair(*case) for case in cases], tokenizer(), ByHand(embed), 16)
    assert measured == pytest.approx(expected)
    assert expected == pytest.approx(0.8)


def squad_file(path: Path, *questions: dict[str, Any], context: str = "A red door.") -> Path:
    entries = [{"id": str(n), "question": " Which? "} | q for n, q in enumerate(questions)]
    content = json.dumps(
        {"data": [{"title": "T", "paragraphs": [{"context": context, "qas": entries}]}]}
    )
    path.write_bytes(lzma.compress(content.encode()) if path.suffix == ".xz" else content.encode())
    return path


def test_questions_with_their_answers(tmp_path: Path) -> None:
    red = {"text": "red", "answer_start": 2}
    file = squad_file(
        tmp_path / "a.json.xz",
        {"answers": [red, {"text": "", "answer_start": 0}, {"text": "blue", "answer_start": 0}]},
        {"answers": [red], "is_impossible": True},
        {},
    )
    one, two, three = read_questions([file])
    assert one == Question("0", "T", "Which?", "A red door.", ((2, "red"), (None, "blue")))
    assert (one.impossible, one.is_placed) == (False, True)
    assert two.answers == three.answers == ()
    assert (two.impossible, two.is_placed) == (True, False)
    assert not Question("", "", "", "", ((None, "x"),)).is_placed


def asked(number: int, *answers: str) -> Question:
    return Question(str(number), "", "", "", tuple((0, text) for text in answers))


def test_the_best_threshold_of_no_answer() -> None:
    questions = [asked(0, "red"), asked(1), asked(2, "blue")]
    best, threshold = best_threshold(questions, ["red", "wrong", "blue"], [-2.0, 5.0, 1.0])
    assert (best, threshold) == (100, 1.0)
    best, threshold = best_threshold([asked(0), asked(1)], ["x", "y"], [1.0, 2.0])
    assert (best, threshold) == (100, 0.0)
    best, threshold = best_threshold([asked(0, "red"), asked(1)], ["red", "x"], [3.0, 1.0])
    assert best == 50
