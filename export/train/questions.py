"""Fine-tuning for question answering: start and end of the answer in a window.

Source: Devlin et al. 2019, sections 4.2 and 4.3.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cloze.export.errors import TrainError
from cloze.export.evaluation.squad import Question, read_questions, score
from cloze.export.heads import SPAN
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.export.model import Model, TorchScorer
from cloze.export.train.batches import PaddedBatch, padded, padded_length, shuffled_batches
from cloze.export.train.card import Run, finish_run
from cloze.export.train.documents import fingerprint, is_held_out
from cloze.export.train.loop import train
from cloze.export.train.low_rank import add_low_rank
from cloze.export.train.recipe import QuestionsRecipe
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.export.train.start import start_from
from cloze.export.train.windows import Window, answers_of, guess, make_windows


@dataclass(frozen=True, slots=True)
class WindowBatch(PaddedBatch):
    """Windows, with the first and last token of each one's answer, int64 [B]."""

    start: Tensor
    end: Tensor


def collate_windows(windows: Sequence[Window], max_tokens: int) -> WindowBatch:
    """Pad windows to the `padded_length` of the longest, at most ``max_tokens``."""
    ids, types = zip(*((each.input_ids, each.token_type_ids) for each in windows), strict=True)
    length = padded_length(max(map(len, ids)), max_tokens)
    starts, ends = torch.tensor([(window.start, window.end) for window in windows]).unbind(1)
    return WindowBatch(*padded(ids, types, length), starts, ends)


class QuestionObjective:
    """Implements `loop.Objective`: start and end of the answer, each chosen among S tokens."""

    def __init__(
        self,
        model: Model,
        windows: list[Window],
        recipe: QuestionsRecipe,
        held_out_figures: Callable[[], Mapping[str, float]],
    ) -> None:
        self.module = model
        self.windows = len(windows)
        """The number of windows to learn from."""
        self._windows, self._held_out_figures = windows, held_out_figures
        self._accumulation = recipe.optimisation.accumulation
        self._max_tokens = recipe.tokens
        lengths = [len(window.input_ids) for window in windows]
        self._batches = shuffled_batches(lengths, recipe.sequences, recipe.seed)
        self.steps = max(1, recipe.epochs * len(windows) // (recipe.sequences * self._accumulation))

    def batch(self, step: int, part: int) -> WindowBatch:
        """Return the ``part``-th batch of a step."""
        indices = self._batches(step * self._accumulation + part)
        return collate_windows([self._windows[index] for index in indices], self._max_tokens)

    def loss(self, batch: WindowBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the mean cross-entropy of start and end, and the share of correct windows."""
        assert self.module.span is not None
        hidden = self.module(batch.input_ids, batch.token_type_ids, batch.attention_mask)
        logits = self.module.span(hidden).float()  # [B, S, 2]
        logits = logits.masked_fill(~batch.attention_mask[:, :, None], -torch.inf)
        start, end = logits.unbind(-1)
        loss = (F.cross_entropy(start, batch.start) + F.cross_entropy(end, batch.end)) / 2
        correct = (start.argmax(1) == batch.start) & (end.argmax(1) == batch.end)
        return loss, {"accuracy": correct.float().mean()}

    def evaluate(self, _: int) -> Mapping[str, float]:
        """Return exact match and F1 on held-out articles, in [0, 1]."""
        self.module.eval()
        return self._held_out_figures()


def finetune_questions(
    source: str, files: list[Path], recipe: QuestionsRecipe, options: RunOptions
) -> Path:
    """Fine-tune a checkpoint for question answering.

    Returns:
        The folder of the new checkpoint, which has only a span head.

    Raises:
        TrainError: the files hold no question to learn from, the windows do not fit the
            checkpoint, or the run fails, see `train`.
        ExportError: the checkpoint cannot be loaded.
    """
    checkpoint = load_checkpoint(source)
    inputs = {
        "checkpoint": checkpoint.source.weights_sha256,
        "file of questions": fingerprint(files),
    }
    acquire_run_dir(options.run_dir, recipe, inputs)
    model = start_from(checkpoint, [SPAN], dropout=recipe.dropout, seed=recipe.seed)
    if recipe.lora:
        add_low_rank(model, recipe.lora, [SPAN])
    max_positions = model.config.max_positions
    if recipe.tokens > max_positions:
        raise TrainError(
            f"windows of {recipe.tokens} tokens exceed the checkpoint's {max_positions} positions"
        )
    objective = make_objective(model, checkpoint.tokenizer, files, recipe, options)
    train(objective, options, seed=recipe.seed, optimisation=recipe.rates)
    title = "An encoder fine-tuned for question answering"
    run = Run(title, source, [checkpoint], files, recipe, options)
    return finish_run(model, checkpoint.tokenizer, run)


def make_objective(
    model: Model,
    tokenizer: CheckpointTokenizer,
    files: list[Path],
    recipe: QuestionsRecipe,
    options: RunOptions,
    *,
    measured: int | None = None,
) -> QuestionObjective:
    """Read the questions, split them by article, and cut them into windows.

    Args:
        measured: the most held-out questions, evenly spread; None: all.

    Raises:
        TrainError: there is no question to learn from, or windows do not fit.
    """
    learnt, held_out = _split_questions(files, recipe)
    held_out = held_out[:: max(1, len(held_out) // measured)] if measured else held_out

    def cut(questions: list[Question]) -> list[Window]:
        return make_windows(
            questions,
            tokenizer,
            tokens=recipe.tokens,
            stride=recipe.stride,
            question_tokens=recipe.question_tokens,
        )

    windows, held_out_windows = cut(learnt), cut(held_out)
    options.report(
        f"{len(learnt):,} questions to learn from in {len(windows):,} windows; "
        f"{len(held_out):,} held out"
    )
    if not windows:
        raise TrainError(
            "every question is of a held-out article; lower held_out or give more articles"
        )
    scorer = TorchScorer(model, options.device)

    def held_out_figures() -> dict[str, float]:
        if not held_out:
            return {}
        percentages = score(
            answers_of(held_out, guess(held_out, held_out_windows, scorer)), held_out
        )
        return {name: value / 100 for name, value in percentages.items()}

    return QuestionObjective(model, windows, recipe, held_out_figures)


def _split_questions(
    files: list[Path], recipe: QuestionsRecipe
) -> tuple[list[Question], list[Question]]:
    """Return the questions to learn from, and the questions of held-out articles.

    A question whose answers have no position in the paragraph gives no label, so such a question
    is only evaluated.
    """
    learnt, held_out = [], []
    for question in read_questions(files):
        if question.impossible and not recipe.unanswerable:
            continue
        if is_held_out(question.title, recipe.held_out):
            held_out.append(question)
        elif question.impossible or question.is_placed:
            learnt.append(question)
    return learnt, held_out
