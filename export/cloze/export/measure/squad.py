"""Questions in SQuAD's formats: reads them, cuts paragraphs into windows, and reads answers.

Sources: Rajpurkar et al. 2016 and 2018; Devlin et al. 2019, sections 4.2 and 4.3 (the answer to an
unanswerable question is ``[CLS]``).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from cloze.export.errors import DataError, TrainError
from cloze.export.measure.documents import read_lines
from cloze.model_store.sequences import without_space


@dataclass(frozen=True, slots=True)
class Question:
    """One question on one paragraph.

    Attributes:
        answers: (first character, text) of each accepted answer; the first character is None if
            the paragraph does not contain the text.
    """

    id: str
    title: str
    question: str
    context: str
    answers: tuple[tuple[int | None, str], ...]

    @property
    def impossible(self) -> bool:
        """Whether no answer is accepted."""
        return not self.answers

    @property
    def is_placed(self) -> bool:
        """Whether the paragraph contains an accepted answer."""
        return any(at is not None for at, _ in self.answers)


def read_questions(files: Iterable[Path]) -> list[Question]:
    """Read files in SQuAD 1.1 or 2.0 format; a ``.xz`` file is decompressed.

    Of several questions with one id, the first is kept. If an ``answer_start`` is wrong, the
    answer is searched in the paragraph.

    Raises:
        DataError: a file is missing or has another format, or the files hold no question.
    """
    questions: dict[str, Question] = {}
    for file in files:
        for question in _read(file):
            questions.setdefault(question.id, question)
    if not questions:
        raise DataError("there are no questions in " + ", ".join(str(file) for file in files))
    return list(questions.values())


def _read(file: Path) -> Iterable[Question]:
    text = "".join(read_lines(file))
    try:
        articles = json.loads(text)["data"]
        return [
            _question(entry, article.get("title", ""), paragraph["context"])
            for article in articles
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file} is not in SQuAD's format: {type(error).__name__} {error}"
        ) from error


def _question(entry: Mapping[str, Any], title: str, context: str) -> Question:
    entries = [] if entry.get("is_impossible") else entry.get("answers", [])
    answers = tuple(
        (_find_answer(context, answer["text"], int(answer["answer_start"])), answer["text"])
        for answer in entries
        if answer["text"]
    )
    for text in (title, entry["question"], context, *(text for _, text in answers)):
        text.encode()  # raises ValueError on a lone surrogate
    return Question(str(entry["id"]), title, entry["question"].strip(), context, answers)


def _find_answer(context: str, text: str, start: int) -> int | None:
    """Return the position of an answer: ``start``, or else the occurrence nearest to ``start``."""
    if context[start : start + len(text)] == text:
        return start
    positions = [match.start() for match in re.finditer(re.escape(text), context)]
    return min(positions, key=lambda position: abs(position - start), default=None)


# ---- windows -------------------------------------------------------------------------------------

MAX_ANSWER_TOKENS = 30
_CHUNK = 1000
"""Questions that are tokenized together."""


@dataclass(frozen=True, slots=True)
class Window:
    """A question and one part of its paragraph.

    Attributes:
        input_ids: int64 [S].
        token_type_ids: int64 [S].
        offsets: int64 [S, 2], first and end character in the paragraph; -1 outside the paragraph.
        start: first token of the answer; 0 (``[CLS]``) if the window does not hold the answer.
        end: last token of the answer; 0 (``[CLS]``) if the window does not hold the answer.
    """

    question: int
    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    start: int
    end: int


def make_windows(
    questions: Sequence[Question],
    text: Tokenizer,
    *,
    tokens: int,
    stride: int,
    question_tokens: int,
) -> list[Window]:
    """Cut the paragraph of each question into windows.

    Args:
        tokens: maximum tokens per window, question and special tokens included.
        stride: tokens that neighbouring windows share.
        question_tokens: maximum tokens per question; longer questions are cut.

    Raises:
        TrainError: a window has no space for the paragraph.
    """
    if question_tokens + text.num_special_tokens_to_add(True) + stride >= tokens:
        raise TrainError(
            f"windows of {tokens} tokens leave no room beside {question_tokens} of the question "
            f"and a stride of {stride}"
        )
    windows: list[Window] = []
    for first in range(0, len(questions), _CHUNK):
        chunk = questions[first : first + _CHUNK]
        text.enable_truncation(question_tokens)
        asked = text.encode_batch([each.question for each in chunk], add_special_tokens=False)
        pairs = [
            (
                each.question[: cut.offsets[-1][1]] if cut.overflowing else each.question,
                each.context,
            )
            for each, cut in zip(chunk, asked, strict=True)
        ]
        text.enable_truncation(tokens, stride=stride, strategy="only_second")
        encodings = text.encode_batch(pairs)
        text.no_truncation()
        for number, encoding in enumerate(encodings, first):
            parts = [encoding, *encoding.overflowing]
            windows += (_window(number, questions[number], part) for part in parts)
    return windows


def _window(number: int, question: Question, encoding: Encoding) -> Window:
    placed = zip(encoding.offsets, encoding.sequence_ids, strict=True)
    places = [place if kind == 1 else (-1, -1) for place, kind in placed]
    offsets = np.array(without_space(question.context, places), np.int64)
    ids, types = (np.array(each, np.int64) for each in (encoding.ids, encoding.type_ids))
    return Window(number, ids, types, offsets, *_answer_tokens(question, offsets))


def _answer_tokens(question: Question, offsets: NDArray[np.int64]) -> tuple[int, int]:
    """Return the first and last token of the first answer with a position that a window holds."""
    (inside,) = np.nonzero(offsets[:, 0] >= 0)
    placed = [(at, at + len(text)) for at, text in question.answers if at is not None]
    if not placed or not len(inside):
        return 0, 0
    start, end = placed[0]
    (covered,) = np.nonzero((offsets[:, 1] > start) & (offsets[:, 0] < end))
    # A window that begins or ends within the answer does not hold it.
    is_whole = offsets[inside[0], 0] <= start and end <= offsets[inside[-1], 1]
    return (int(covered[0]), int(covered[-1])) if is_whole and len(covered) else (0, 0)


@dataclass(frozen=True, slots=True)
class Guess:
    """The best span of a question over its windows.

    Attributes:
        null_margin: the score of "no answer" minus the span's, in logits.
    """

    text: str
    null_margin: float


def best_guesses(
    questions: Sequence[Question], windows: Sequence[Window], logits: Iterable[NDArray[np.float32]]
) -> list[Guess]:
    """Return the best span of each question over its windows, from their logits [S, 2]."""
    best = [(-np.inf, "")] * len(questions)
    null_scores = [np.inf] * len(questions)
    for window, rows in zip(windows, logits, strict=True):
        number, offsets = window.question, window.offsets
        score, (first, last) = best_span(rows, offsets[:, 0] >= 0)
        text = questions[number].context[offsets[first, 0] : offsets[last, 1]]
        best[number] = max(best[number], (score, text))
        null_scores[number] = min(null_scores[number], float(rows[0].sum()))
    return [
        Guess(text, null_score - score)
        for (score, text), null_score in zip(best, null_scores, strict=True)
    ]


def answers_of(
    questions: Sequence[Question], guesses: Sequence[Guess], threshold: float = 0.0
) -> dict[str, str]:
    """Return the answers by question id.

    If any question is unanswerable, an answer is empty where ``[CLS]`` scores higher than the span
    by more than the threshold, in logits.
    """
    any_impossible = any(question.impossible for question in questions)
    return {
        question.id: "" if any_impossible and guessed.null_margin > threshold else guessed.text
        for question, guessed in zip(questions, guesses, strict=True)
    }


def best_span(
    logits: NDArray[np.float32], in_context: NDArray[np.bool_]
) -> tuple[float, tuple[int, int]]:
    """Return the score and the tokens of the best span of at most `MAX_ANSWER_TOKENS` tokens.

    Args:
        logits: float32 [S, 2], start and end.
        in_context: bool [S], True for tokens of the paragraph.
    """
    places = np.arange(len(logits))
    lengths = 1 + places - places[:, None]  # [S, S], of the span from a row to a column
    allowed = in_context[:, None] & in_context & (lengths > 0) & (lengths <= MAX_ANSWER_TOKENS)
    scores = np.where(allowed, logits[:, :1] + logits[:, 1], -np.inf)
    first, last = divmod(int(scores.argmax()), len(logits))
    return float(scores[first, last]), (first, last)
