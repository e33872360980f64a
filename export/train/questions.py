"""Questions on paragraphs: start and end of the answer in a window.

Source: Devlin et al. 2019, sections 4.2 and 4.3.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cloze.export.errors import Report, TrainError
from cloze.export.measure.documents import is_held_out
from cloze.export.measure.metrics import squad_answers
from cloze.export.measure.squad import Question, read_questions
from cloze.export.measure.windows import Window, answers_of, best_guesses, make_windows
from cloze.export.train.batches import PaddedBatch
from cloze.export.train.folder import Folder
from cloze.export.train.recipe import QuestionsSettings
from cloze.export.train.rows import Floats, TaskRows
from cloze.model_store.heads import span

SPAN: Final = span.HEAD.name


class WindowRows(TaskRows):
    """Questions as windows, in which start and end of the answer are each chosen among S tokens."""

    head, figure = SPAN, "f1"

    def __init__(
        self,
        settings: QuestionsSettings,
        windows: list[Window],
        held_out_windows: list[Window],
        held_out: list[Question],
    ) -> None:
        super().__init__(settings, windows, held_out_windows)
        self._held_out = held_out
        self.targets = [np.array([window.start, window.end]) for window in windows]

    def logits(self, output: Any, batch: PaddedBatch) -> Tensor:
        """Return the logits of start and end, [B, S, 2]; minus infinity for padding."""
        logits = torch.stack([output.start_logits, output.end_logits], -1)
        return logits.masked_fill(~batch.attention_mask[:, :, None], -torch.inf)

    def loss(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the mean cross-entropy of start and end, and the share of correct windows."""
        right = (logits.argmax(1) == targets).all(1)
        return F.cross_entropy(logits, targets), {"accuracy": right.float().mean()}

    def figures(self, logits: Sequence[Floats]) -> Mapping[str, float]:
        """Return exact match and F1 on held-out articles, in [0, 1]."""
        questions = self._held_out
        answers = answers_of(questions, best_guesses(questions, self.held_out_rows, logits))
        return {name: value / 100 for name, value in squad_answers(answers, questions).items()}


def read_windows(
    files: Sequence[Path],
    settings: QuestionsSettings,
    source: Folder,
    report: Report,
    *,
    measured: int | None = None,
) -> WindowRows:
    """Read the questions, split them by article, and cut them into windows.

    A question whose answers have no position in the paragraph gives no label, so such a question
    is only evaluated.

    Args:
        measured: the most held-out questions, evenly spread; None: all.

    Raises:
        TrainError: there is no question to learn from, or windows do not fit.
    """
    learnt: list[Question] = []
    held_out: list[Question] = []
    for question in read_questions(files):
        if question.impossible and not settings.unanswerable:
            continue
        if is_held_out(question.title, settings.held_out):
            held_out.append(question)
        elif question.impossible or question.is_placed:
            learnt.append(question)
    held_out = held_out[:: max(1, len(held_out) // measured)] if measured else held_out
    windows, held_out_windows = (
        make_windows(
            questions,
            source.text,
            tokens=settings.tokens,
            stride=settings.stride,
            question_tokens=settings.question_tokens,
        )
        for questions in (learnt, held_out)
    )
    report(
        f"{len(learnt):,} questions to learn from in {len(windows):,} windows; "
        f"{len(held_out):,} held out"
    )
    if not windows:
        raise TrainError(
            "every question is of a held-out article; lower held_out or give more articles"
        )
    return WindowRows(settings, windows, held_out_windows, held_out)
