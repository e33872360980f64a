"""SQuAD files and measures: the official evaluation is the oracle."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloze.export.errors import TrainError
from cloze.export.load.tokenizer import CheckpointTokenizer, describe_tokenizer
from cloze.export.measure.documents import Document
from cloze.export.measure.metrics import squad_answers
from cloze.export.measure.squad import (
    Question,
    Window,
    answers_of,
    best_guesses,
    best_span,
    make_windows,
    read_questions,
)
from cloze.export.train.vocabulary import train_tokenizer
from tests.oracles.squad_v4 import GOLDEN, as_squad
from tests.support.training import STORIES

CASES = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("case", CASES, ids=["version 2.0", "version 1.1"])
def test_scores_equal_the_official_evaluation(case: dict, tmp_path: Path) -> None:
    file = tmp_path / "squad.json"
    file.write_text(json.dumps(as_squad(case["rows"])))
    figures = squad_answers(
        {f"q{n}": text for n, (_, text) in enumerate(case["rows"])}, read_questions([file])
    )
    official = case["figures"]
    assert figures["exact_match"] == pytest.approx(official["exact"])
    assert figures["f1"] == pytest.approx(official["f1"])
    if not all(accepted for accepted, _ in case["rows"]):
        assert figures["answerable_f1"] == pytest.approx(official["HasAns_f1"])
        assert figures["answerable_exact_match"] == pytest.approx(official["HasAns_exact"])
        assert figures["unanswerable_exact_match"] == pytest.approx(official["NoAns_exact"])
    else:
        assert set(figures) == {"exact_match", "f1"}


def test_an_answer_is_found_where_it_stands_nearest(tmp_path: Path) -> None:
    """Published files hold starts that are off by some characters."""
    context = "A red door. A red house. A red door."
    entry = {
        "id": "1",
        "question": "Which?",
        "answers": [{"text": "red door", "answer_start": 24}, {"text": "blue", "answer_start": 3}],
    }
    file = tmp_path / "squad.json"
    file.write_text(
        json.dumps({"data": [{"title": "t", "paragraphs": [{"context": context, "qas": [entry]}]}]})
    )
    (question,) = read_questions([file])
    assert question.answers == ((27, "red door"), (None, "blue"))
    assert (
        squad_answers({"1": "blue"}, [question])["exact_match"] == 100
    )  # it is accepted, though nothing can be learnt from it


CONTEXT = " ".join(
    f"In {1700 + n} the Café of Müller no. {n} sold {3 * n} cakes." for n in range(12)
)
QUESTIONS = [
    Question(
        str(n),
        "t",
        f"How many cakes did no. {n} sell?",
        CONTEXT,
        ((CONTEXT.index(f"{3 * n} cakes"), f"{3 * n} cakes"),),
    )
    for n in range(1, 12)
]


@pytest.fixture(scope="module")
def tokenizer() -> CheckpointTokenizer:
    documents = [*STORIES, Document(CONTEXT, "cakes")]
    learnt = train_tokenizer(lambda: documents, size=170, lowercase=True)
    return describe_tokenizer(learnt.backend_tokenizer)


@settings(deadline=None, max_examples=25)
@given(tokens=st.integers(40, 120), stride=st.integers(1, 15), cut=st.integers(4, 16))
def test_windows_cover_the_paragraph_and_point_at_the_answer(
    tokenizer: CheckpointTokenizer, tokens: int, stride: int, cut: int
) -> None:
    windows = make_windows(
        QUESTIONS, tokenizer.tokenizer, tokens=tokens, stride=stride, question_tokens=cut
    )
    for number, question in enumerate(QUESTIONS):
        mine = [window for window in windows if window.question == number]
        assert all(len(window.input_ids) <= tokens for window in mine)
        covered = np.zeros(len(CONTEXT), bool)
        for window in mine:
            for first, end in window.offsets[window.offsets[:, 0] >= 0]:
                covered[first:end] = True
            if window.start:
                text = CONTEXT[window.offsets[window.start, 0] : window.offsets[window.end, 1]]
                assert text == question.answers[0][1]
        assert all(covered[at] for at, character in enumerate(CONTEXT) if not character.isspace())
        # An answer of fewer tokens than neighbours share lies wholly in one of them.
        answer_tokens = len(
            tokenizer.tokenizer.encode(question.answers[0][1], add_special_tokens=False).ids
        )
        if answer_tokens <= stride:
            assert any(window.start for window in mine)


def right_logits(windows: list[Window]) -> list[np.ndarray]:
    """Score the right tokens highest, and ``[CLS]`` where the window has no answer."""
    rows = []
    for window in windows:
        logits = np.full((len(window.input_ids), 2), -5, np.float32)
        logits[window.start, 0] = logits[window.end, 1] = 5
        rows.append(logits)
    return rows


def test_right_logits_give_the_right_answers(tokenizer: CheckpointTokenizer) -> None:
    nothing = Question("none", "t", "Who was king?", CONTEXT, ())
    questions = [*QUESTIONS, nothing, Question("brief", "t", "Was he the king?", "No.", ())]
    windows = make_windows(
        questions, tokenizer.tokenizer, tokens=110, stride=20, question_tokens=40
    )
    answers = answers_of(questions, best_guesses(questions, windows, right_logits(windows)))
    assert squad_answers(answers, questions)["exact_match"] == 100
    assert answers["none"] == ""


def test_a_window_has_room_for_the_paragraph(tokenizer: CheckpointTokenizer) -> None:
    with pytest.raises(TrainError, match="windows of 63 tokens leave no room"):
        make_windows(QUESTIONS, tokenizer.tokenizer, tokens=63, stride=20, question_tokens=40)


@pytest.mark.parametrize("nulls", [(1, 5), (5, 1)])
def test_no_answer_scores_as_in_the_window_that_doubts_it_most(nulls: tuple[int, int]) -> None:
    offsets = np.array([[-1, -1], [0, 1], [1, 2], [-1, -1]])
    ids = np.zeros(4, np.int64)
    windows = [Window(0, ids, ids, offsets, 0, 0) for _ in nulls]
    logits = np.zeros((2, 4, 2), np.float32)
    logits[:, 0, 0] = nulls  # the score of "no answer" is the sum at [CLS]
    [guessed] = best_guesses([Question("q", "t", "Who?", "ab", ())], windows, logits)
    assert guessed.null_margin == 1


@pytest.mark.parametrize(("end", "tokens"), [(30, 30), (31, 1)])
def test_an_answer_has_at_most_30_tokens(end: int, tokens: int) -> None:
    logits = np.zeros((40, 2), np.float32)
    logits[1, 0], logits[end, 1] = 5, 4
    inside = np.ones(40, bool)
    inside[0] = False
    _, (first, last) = best_span(logits, inside)
    assert (first, last - first + 1) == (1, tokens)
