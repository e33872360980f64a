"""Question answering over windows: cuts paragraphs into windows, and reads answers from logits.

Source: Devlin et al. 2019, sections 4.2 and 4.3 (the answer to an unanswerable question is
``[CLS]``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloze.export.errors import TrainError
from cloze.export.evaluation.scorer import Scorer, equal_lengths, head_arrays
from cloze.export.evaluation.squad import Question
from cloze.export.heads import SPAN
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.model_store.sequences import without_space

MAX_ANSWER_TOKENS = 30
_TOKENS = 384
"""Tokens of a window, where no recipe says another number."""

_START_CANDIDATES = 20


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
    tokenizer: CheckpointTokenizer,
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
    special = tokenizer.special
    if question_tokens + special.pair_tokens + stride >= tokens:
        raise TrainError(
            f"windows of {tokens} tokens leave no room beside {question_tokens} of the question "
            f"and a stride of {stride}"
        )
    encoded_questions = tokenizer.tokenizer.encode_batch(
        [question.question for question in questions], add_special_tokens=False
    )
    encoded_contexts = tokenizer.tokenizer.encode_batch(
        [question.context for question in questions], add_special_tokens=False
    )
    windows = []
    rows = zip(questions, encoded_questions, encoded_contexts, strict=True)
    for index, (question, encoded_question, context) in enumerate(rows):
        asked = encoded_question.ids[:question_tokens]
        ids = np.asarray(context.ids, np.int64)
        characters = without_space(question.context, context.offsets)
        offsets = np.asarray(characters, np.int64).reshape(-1, 2)
        span = _answer_span(question, offsets)
        part_tokens = tokens - len(asked) - special.pair_tokens
        for begin in range(0, max(len(ids) - stride, 1), part_tokens - stride):
            part = slice(begin, begin + part_tokens)
            context_start = special.second_start(len(asked))
            start, end = _span_in_part(span, begin, len(ids[part]), context_start)
            outside = np.full((context_start, 2), -1)
            windows.append(
                Window(
                    index,
                    np.array(special.pair(asked, ids[part]), np.int64),
                    special.pair_types(len(asked), len(ids[part])).astype(np.int64),
                    np.concatenate([outside, offsets[part], outside[:1]]),
                    start,
                    end,
                )
            )
    return windows


def usual_windows(
    questions: Sequence[Question], tokenizer: CheckpointTokenizer, max_tokens: int
) -> list[Window]:
    """Cut paragraphs into windows for evaluation, of at most ``max_tokens`` tokens."""
    tokens = min(_TOKENS, max_tokens)
    return make_windows(
        questions, tokenizer, tokens=tokens, stride=tokens // 3, question_tokens=tokens // 6
    )


def _answer_span(question: Question, offsets: NDArray[np.int64]) -> tuple[int, int] | None:
    """Return the first and last paragraph token of the first answer with a position."""
    for position, text in question.answers:
        if position is not None:
            overlaps = (offsets[:, 1] > position) & (offsets[:, 0] < position + len(text))
            covered = np.flatnonzero(overlaps)
            if len(covered):
                return int(covered[0]), int(covered[-1])
    return None


def _span_in_part(
    span: tuple[int, int] | None, begin: int, size: int, prefix_size: int
) -> tuple[int, int]:
    """Return the span in a window over ``size`` paragraph tokens from ``begin`` on.

    The result is ``(0, 0)``, the position of ``[CLS]``, if the part does not hold the whole span.
    """
    if span is None or span[0] < begin or span[1] >= begin + size:
        return 0, 0
    return span[0] - begin + prefix_size, span[1] - begin + prefix_size


@dataclass(frozen=True, slots=True)
class Guess:
    """The best span of a question over its windows.

    Attributes:
        null_margin: the score of "no answer" minus the span's, in logits.
    """

    text: str
    null_margin: float


def guess(
    questions: Sequence[Question], windows: Sequence[Window], scorer: Scorer, *, batch: int = 16
) -> list[Guess]:
    """Return the best span of each question over its windows."""
    best = [(-np.inf, "")] * len(questions)
    null_scores = [np.inf] * len(questions)
    for members in equal_lengths([len(window.input_ids) for window in windows], batch):
        group = [windows[index] for index in members]
        logits = head_arrays(
            scorer,
            SPAN,
            np.stack([window.input_ids for window in group]),
            np.stack([window.token_type_ids for window in group]),
        )
        for window, rows in zip(group, logits, strict=True):
            number, offsets = window.question, window.offsets
            score, (first, last) = _best_span(rows, offsets[:, 0] >= 0)
            text = questions[number].context[offsets[first, 0] : offsets[last, 1]]
            best[number] = max(best[number], (score, text))
            null_scores[number] = min(null_scores[number], float(rows[0].sum()))
    return [
        Guess(text, null_score - score)
        for (score, text), null_score in zip(best, null_scores, strict=True)
    ]


def answers_of(questions: Sequence[Question], guesses: Sequence[Guess]) -> dict[str, str]:
    """Return the answers by question id.

    If any question is unanswerable, an answer is empty where ``[CLS]`` scores higher.
    """
    any_impossible = any(question.impossible for question in questions)
    return {
        question.id: "" if any_impossible and guessed.null_margin > 0 else guessed.text
        for question, guessed in zip(questions, guesses, strict=True)
    }


def _best_span(
    logits: NDArray[np.float32], in_context: NDArray[np.bool_]
) -> tuple[float, tuple[int, int]]:
    """Return the score and the tokens of the best span of at most `MAX_ANSWER_TOKENS` tokens.

    Args:
        logits: float32 [S, 2], start and end.
        in_context: bool [S], True for tokens of the paragraph.
    """
    positions = np.flatnonzero(in_context)
    starts = positions[np.argsort(-logits[positions, 0])[:_START_CANDIDATES]]
    best = (-np.inf, (0, 0))
    for start in starts:
        ends = positions[(positions >= start) & (positions < start + MAX_ANSWER_TOKENS)]
        end = ends[np.argmax(logits[ends, 1])]
        best = max(best, (float(logits[start, 0] + logits[end, 1]), (int(start), int(end))))
    return best
