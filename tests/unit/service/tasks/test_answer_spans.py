"""Answers from the logits of a context's windows, by hand."""

import tracemalloc
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cloze.service.tasks import answer_spans
from cloze.service.tasks.answer_spans import (
    QaAnswer,
    QaOptions,
    Question,
    SpanMemory,
    first_ends,
)
from cloze.service.tasks.texts import Bounds
from cloze.service.text.tokenizer import Spans
from tests.support.refusals import refused


def spans(offsets: list[tuple[int, int]], words: list[int]) -> Spans:
    starts, ends = zip(*offsets, strict=True)
    return Spans(*(array("i", part) for part in (range(len(words)), starts, ends, words)))


def asking(context: str, made: Spans, context_start: int, windows: list[Bounds]) -> Question:
    return Question(context, made, context_start, windows, first_ends(context, made))


CONTEXT = "red doors open Red"
SPANS = spans([(0, 3), (4, 8), (8, 9), (10, 14), (15, 18)], [0, 1, 1, 2, 3])
OPTIONS = QaOptions(max_seq_len=12, max_answer_len=3, max_question_len=4)
QUESTION = asking(CONTEXT, SPANS, 3, [(0, 5)])


def window(*context: tuple[float, float], cls: tuple[float, float] = (0.0, 0.0)) -> np.ndarray:
    """Return logits of [CLS], a question of 1 token, [SEP], the context and [SEP]."""
    other = (50.0, 50.0)  # not part of the softmax
    return np.array([cls, other, other, *context, other], np.float32)


LOW = (-9.0, -9.0)


def best_answers(
    question: Question,
    logits: list[np.ndarray],
    options: QaOptions,
    memory: SpanMemory | None = None,
) -> Any:
    """Return the best answers to a question, alone in its request unless there is a memory."""
    return answer_spans.best_answers(question, logits, options, memory or SpanMemory())


def only(answers: object) -> QaAnswer:
    if isinstance(answers, list):  # top_k is above 1
        [answers] = answers
    assert isinstance(answers, QaAnswer)
    return answers


def test_words_are_not_extended_beyond_their_window() -> None:
    question = asking(CONTEXT, SPANS, 3, [(0, 2), (2, 5)])
    first, second = window(LOW, (5.0, 5.0)), window(LOW, LOW, LOW)
    assert only(best_answers(question, [first, second], OPTIONS)).answer == "door"
    first, second = window(LOW, LOW), window((5.0, 5.0), LOW, LOW)
    assert only(best_answers(question, [first, second], OPTIONS)).answer == "s"


def test_the_answers_are_the_best_of_all_windows() -> None:
    question = asking(CONTEXT, SPANS, 3, [(0, 3), (2, 5)])
    logits = [window((1.0, 1.0), LOW, LOW), window(LOW, (3.0, 3.0), LOW)]
    answers = best_answers(question, logits, QaOptions(12, 1, 4, top_k=2))
    assert [(a.answer, a.start, a.end) for a in answers] == [("open", 10, 14), ("red", 0, 3)]


def test_an_answer_of_several_windows_has_the_score_of_the_best() -> None:
    """The sum over both windows, which transformers gives, is 1.6 here."""
    question = asking(CONTEXT, SPANS, 3, [(0, 4), (3, 5)])
    low = window((-9.0, -9.0), LOW, LOW, (1.5, 1.5))  # "open", which the windows share
    high = window((2.5, 2.5), LOW)
    shares = [np.exp(n) / (np.exp(n) + 1 + 4 * np.exp(-9)) for n in (1.5, 2.5)]
    assert shares[0] ** 2 + shares[1] ** 2 > 1.5
    for logits in ([low, high], [low, window((0.5, 0.5), LOW)]):
        alone = [only(best_answers(replace(question, windows=[bounds]), [row], OPTIONS))
                 for bounds, row in zip(question.windows, logits, strict=True)]  # fmt: skip
        best = only(best_answers(question, logits, OPTIONS))
        assert best == max(alone, key=lambda answer: answer.score)
        assert best.answer == "open"


def test_a_score_is_at_most_1() -> None:
    """Also where float32 rounds the probabilities of a window to a sum above 1."""
    never = (-1000.0, -1000.0)
    logits = window((0.0, 0.0), never, never, never, (-17.5, -17.5), cls=never)
    answer = only(best_answers(QUESTION, [logits], OPTIONS))
    assert (answer.answer, answer.score) == ("red", 1.0)


def test_no_answer_has_the_least_score_of_all_windows() -> None:
    question = asking(CONTEXT, SPANS, 3, [(0, 3), (2, 5)])
    options = QaOptions(12, 1, 4, top_k=3, handle_impossible_answer=True)
    sure = window((1.0, 1.0), LOW, LOW, cls=(9.0, 9.0))
    unsure = window(LOW, (1.0, 1.0), LOW, cls=(0.0, 1.0))
    answers = best_answers(question, [sure, unsure], options)
    (nothing,) = [a for a in answers if a.answer == ""]
    starts, ends = np.exp([0, -9, 1, -9]), np.exp([1, -9, 1, -9])
    assert nothing.score == pytest.approx(
        float(starts[0] / starts.sum() * ends[0] / ends.sum()), rel=1e-4
    )
    assert (nothing.start, nothing.end) == (0, 0)
    without = best_answers(question, [sure, unsure], QaOptions(12, 1, 4, top_k=3))
    assert all(a.answer for a in without)


@pytest.mark.parametrize("threshold", [-3.0, 0.0, 2.0])
def test_no_answer_wins_where_it_exceeds_a_span_by_more_than_the_threshold(
    threshold: float,
) -> None:
    options = QaOptions(12, 1, 4, top_k=9, handle_impossible_answer=True)
    options = replace(options, no_answer_threshold=threshold)
    for above in (-0.1, 0.1):
        cls = (1.0 + threshold + above, 1.0)
        answers = best_answers(QUESTION, [window((1.0, 1.0), *[LOW] * 4, cls=cls)], options)
        assert [answer.answer for answer in answers[:2]] == (
            ["", "red"] if above > 0 else ["red", ""]
        )
        assert answers[0].score + answers[1].score < 1
        ratio = {answer.answer: answer.score for answer in answers}
        assert ratio[""] / ratio["red"] == pytest.approx(np.exp(above), rel=1e-4)


def test_details_name_the_best_span_of_each_window_and_its_rank() -> None:
    question = asking(CONTEXT, SPANS, 3, [(0, 1), (1, 3), (3, 5)])
    options = QaOptions(12, 1, 4, top_k=1, details=True)
    doubtful = window((1.0, 1.0), cls=(2.0, 2.0))
    sure = window((3.0, 3.0), LOW)
    details = best_answers(question, [doubtful, window((2.0, 2.0), LOW), sure], options)
    assert [a.answer for a in details.answers] == ["open"]
    first, other, second = details.windows
    assert (first.start, first.end, second.start, second.end) == (0, 3, 10, 18)
    assert (first.best.answer, first.rank, other.rank) == ("red", 3, 2)
    assert first.reason == "2 answers have a higher score; the window rather has no answer"
    assert other.reason == "1 answer has a higher score"
    assert (second.best.answer, second.rank, second.reason) == ("open", 1, "returned")
    assert first.no_answer > first.best.score
    assert second.no_answer < second.best.score


def test_twelve_spans_of_a_window_are_extended_to_words_for_one_answer() -> None:
    # 13 words of one text, each less likely than the one before it: the last is left out.
    words = 13
    places = [(2 * n, 2 * n + 1) for n in range(words)]
    question = asking("a " * words, spans(places, list(range(words))), 1, [(0, 13)])
    rows = np.array([(-99, -99), *((-n / 4, -n / 4) for n in range(words))], np.float32)
    answer = only(best_answers(question, [rows], QaOptions(20, 1, 4)))
    shares = np.exp(-np.arange(words) / 4)
    shares /= shares.sum()
    assert answer.score == pytest.approx((shares[:12] ** 2).sum(), rel=1e-4)
    more = only(best_answers(question, [rows], QaOptions(20, 1, 4, top_k=2)))
    assert more.score == pytest.approx((shares**2).sum(), rel=1e-4)  # 14 spans


def test_only_the_answers_of_the_questions_before_are_kept() -> None:
    answer = QaAnswer("a" * 744, 1.0, 0, 744)  # 1000 bytes
    left = (24_000_000 - 256 - 4000) // 2
    memory = SpanMemory()
    for _ in range(2):
        memory.add(1_000_000)
        memory.keep([answer, answer])
    memory.add(left)
    memory.keep([])
    with refused("limit_exceeded", 24000000):
        memory.add(left + 1)


def test_the_spans_of_an_answer_are_counted() -> None:
    memory = SpanMemory()
    text = "a" * 10_000_000
    question = asking(text, spans([(5_000_000, len(text))], [0]), 1, [(0, 1)])
    logits = [np.zeros((2, 2), np.float32)]
    for _ in range(3):
        best_answers(question, logits, OPTIONS, memory)  # 10 MB of spans, of which 5 stay
    with refused("limit_exceeded"):
        best_answers(question, logits, OPTIONS, memory)


@pytest.mark.parametrize("at_once", [1, 7, 1 << 18])
@pytest.mark.parametrize("levels", [2, 5, None])
def test_spans_are_those_of_the_matrix_of_all_starts_and_ends(
    at_once: int, levels: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few levels of scores make ties, of which the first spans are the best."""
    monkeypatch.setattr(answer_spans, "_MOST_PRODUCTS", at_once)
    random = np.random.default_rng(levels)
    for tokens, count, most in ((1, 1, 9), (9, 4, 3), (9, 99, 9), (30, 12, 15), (30, 600, 40)):
        scores = random.random((tokens, 2)).astype(np.float32)
        if levels is not None:
            scores = np.floor(scores * levels).astype(np.float32)
        matrix = np.tril(np.triu(np.outer(scores[:, 0], scores[:, 1])), most - 1)
        flat = [(-float(score), *divmod(place, tokens)) for place, score in enumerate(matrix.flat)]
        best = sorted(span for span in flat if span[1] <= span[2] < span[1] + most)[:count]
        expected = [(-score, start, end) for score, start, end in best if score or best[0][0] == 0]
        if best[0][0] == 0:
            expected = expected[:1]
        assert answer_spans._best_spans(scores.T, np.arange(tokens), count, most) == expected


def test_scores_of_long_answers_need_no_matrix() -> None:
    """A context of 8,000 tokens has 64 million pairs of a start and an end: 256 MB."""
    scores = np.random.default_rng(0).random((8_000, 2)).astype(np.float32)
    tracemalloc.start()
    answer_spans._best_spans(scores.T, np.arange(8_000), 12, 8_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000


BLANK = "red \t\t  doors"
"""A context whose white space has tokens, as in byte-level BPE: some of no characters."""

BLANK_SPANS = spans([(0, 3), (4, 5), (6, 6), (6, 8), (8, 13)], [0, 1, 1, 2, 3])


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("impossible", [True, False])
def test_white_space_is_no_answer(align: bool, impossible: bool) -> None:
    options = QaOptions(
        12, 5, 4, top_k=50, align_to_words=align, handle_impossible_answer=impossible
    )
    question = asking(BLANK, BLANK_SPANS, 3, [(0, 5)])
    high = (9.0, 9.0)
    texts = [
        a.answer for a in best_answers(question, [window(LOW, high, high, high, LOW)], options)
    ]
    assert texts.count("") == impossible
    assert {"red", "doors", BLANK} < set(texts), "what white space is a part of"
    assert all(text.strip() for text in texts if text)


def test_a_window_of_white_space_has_no_answer() -> None:
    options = QaOptions(12, 5, 4, top_k=5, details=True)
    question = asking(BLANK, BLANK_SPANS, 3, [(0, 1), (1, 4), (4, 5)])
    logits = [window(LOW), window(LOW, LOW, LOW), window((5.0, 5.0))]
    details = best_answers(question, logits, options)
    assert [answer.answer for answer in details.answers] == ["doors", "red"]
    assert [(at.start, at.end) for at in details.windows] == [(0, 3), (8, 13)]


def test_a_span_of_white_space_is_no_answer_whatever_its_score() -> None:
    """Also if the scores of all other spans are 0, and where rows are searched one at a time."""
    never = (-1000.0, -1000.0)
    question = asking(BLANK, BLANK_SPANS, 3, [(0, 5)])
    logits = window(never, (0.0, 0.0), never, never, never, cls=never)
    answer = only(best_answers(question, [logits], OPTIONS))
    assert (answer.answer, answer.score) == ("red", 0)
