"""Windows and guesses of a checkpoint or a graph, for evaluation; see `answers`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cloze.export.heads import SPAN
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.export.measure.scorer import Scorer, equal_lengths, head_arrays
from cloze.export.measure.squad import Question
from cloze.export.train.answers import Guess, Window, best_guesses, make_windows

_TOKENS = 384
"""Tokens of a window, where no recipe says another number."""


def usual_windows(
    questions: Sequence[Question], tokenizer: CheckpointTokenizer, max_tokens: int
) -> list[Window]:
    """Cut paragraphs into windows for evaluation, of at most ``max_tokens`` tokens."""
    tokens = min(_TOKENS, max_tokens)
    return make_windows(
        questions,
        tokenizer.tokenizer,
        tokenizer.special,
        tokens=tokens,
        stride=tokens // 3,
        question_tokens=tokens // 6,
    )


def guess(
    questions: Sequence[Question], windows: Sequence[Window], scorer: Scorer, *, batch: int = 16
) -> list[Guess]:
    """Return the best span of each question over its windows."""
    logits: dict[int, NDArray[np.float32]] = {}
    for members in equal_lengths([len(window.input_ids) for window in windows], batch):
        group = [windows[index] for index in members]
        ids = np.stack([window.input_ids for window in group])
        types = np.stack([window.token_type_ids for window in group])
        logits |= zip(members, head_arrays(scorer, SPAN, ids, types), strict=True)
    return best_guesses(questions, windows, (logits[index] for index in range(len(windows))))
