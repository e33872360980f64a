"""Question answering over windows: cuts paragraphs into windows, and reads answers from logits.

Source: Devlin et al. 2019, sections 4.2 and 4.3 (the answer to an unanswerable question is
``[CLS]``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from cloze.export.errors import TrainError
from cloze.export.measure.squad import Question
from cloze.model_store.sequences import without_space

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
    offsets = np.array(without_space(question.context, encoding.offsets), np.int64)
    offsets[[kind != 1 for kind in encoding.sequence_ids]] = -1
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
    questions: Sequence[Question],
    windows: Sequence[Window],
    logits: Iterable[NDArray[np.float32]],
) -> list[Guess]:
    """Return the best span of each question over its windows.

    Args:
        logits: float32 [S, 2] of each window, start and end.
    """
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
