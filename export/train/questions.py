"""Fine-tuning for question answering: start and end of the answer in a window.

Source: Devlin et al. 2019, sections 4.2 and 4.3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForQuestionAnswering, PreTrainedModel

from cloze.export.errors import Report, TrainError
from cloze.export.measure.metrics import squad_answers
from cloze.export.measure.squad import Question, read_questions
from cloze.export.train.adapters import add_low_rank
from cloze.export.train.answers import Window, answers_of, best_guesses, make_windows
from cloze.export.train.batches import PaddedBatch, padded, padded_length, shuffled_batches
from cloze.export.train.card import Run, write_run
from cloze.export.train.documents import fingerprint, is_held_out
from cloze.export.train.folder import Folder, max_tokens
from cloze.export.train.loop import batches_per_step, train
from cloze.export.train.recipe import QuestionsRecipe, QuestionsSettings
from cloze.export.train.rows import model_inputs, outputs_of
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions

QUESTIONS_FIGURE = "f1"


@dataclass(frozen=True, slots=True)
class WindowBatch(PaddedBatch):
    """Windows, with the first and last token of each one's answer, int64 [B]."""

    start: Tensor
    end: Tensor


@dataclass(frozen=True, slots=True)
class QuestionData:
    """Questions as windows, which were read and checked."""

    windows: list[Window]
    held_out: list[Question]
    held_out_windows: list[Window]


class QuestionObjective:
    """Implements `loop.Objective`: start and end of the answer, each chosen among S tokens.

    Args:
        batches: batches per step.
    """

    def __init__(
        self,
        network: Any,
        data: QuestionData,
        settings: QuestionsSettings,
        *,
        steps: int,
        batches: int,
        seed: int,
    ) -> None:
        self.module, self.steps = network, steps
        self._config = network.config
        self._data, self._settings, self._batches_per_step = data, settings, batches
        self._max_tokens = max_tokens(network)
        if settings.tokens > self._max_tokens:
            raise TrainError(
                f"windows of {settings.tokens} tokens exceed the checkpoint's "
                f"{self._max_tokens} positions"
            )
        lengths = [len(window.input_ids) for window in data.windows]
        self._batches = shuffled_batches(lengths, settings.sequences, seed)

    def batch(self, step: int, part: int) -> WindowBatch:
        """Return the ``part``-th batch of a step."""
        indices = self._batches(step * self._batches_per_step + part)
        windows = [self._data.windows[index] for index in indices]
        ids = [window.input_ids for window in windows]
        types = [window.token_type_ids for window in windows]
        length = padded_length(max(map(len, ids)), self._max_tokens)
        starts, ends = torch.tensor([(window.start, window.end) for window in windows]).unbind(1)
        return WindowBatch(*padded(ids, types, length), starts, ends)

    def logits(self, batch: PaddedBatch) -> Tensor:
        """Return the logits of start and end, float32 [B, S, 2]; minus infinity for padding."""
        outputs = self.module(**model_inputs(batch, self._config))
        logits = torch.stack([outputs.start_logits, outputs.end_logits], -1).float()
        return logits.masked_fill(~batch.attention_mask[:, :, None], -torch.inf)

    def loss(self, batch: WindowBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the mean cross-entropy of start and end, and the share of correct windows."""
        start, end = self.logits(batch).unbind(-1)
        loss = (F.cross_entropy(start, batch.start) + F.cross_entropy(end, batch.end)) / 2
        correct = (start.argmax(1) == batch.start) & (end.argmax(1) == batch.end)
        return loss, {"accuracy": correct.float().mean()}

    def evaluate(self, _: int) -> Mapping[str, float]:
        """Return exact match and F1 on held-out articles, in [0, 1]."""
        questions, windows = self._data.held_out, self._data.held_out_windows
        if not questions:
            return {}
        size = self._settings.sequences
        logits = outputs_of(
            self.module, windows, self.logits, size=size, max_tokens=self._max_tokens
        )
        answers = answers_of(questions, best_guesses(questions, windows, logits))
        return {name: value / 100 for name, value in squad_answers(answers, questions).items()}


def finetune_questions(
    source: Folder, files: list[Path], recipe: QuestionsRecipe, options: RunOptions
) -> Path:
    """Fine-tune a model for question answering.

    Returns:
        The folder of the new model, which has only a head for answers.

    Raises:
        TrainError: the files hold no question to learn from, the windows do not fit the model, or
            the run fails, see `train`.
    """
    data = read_question_data(files, source, recipe, options.report)
    inputs = {"checkpoint": source.weights_sha256, "file of questions": fingerprint(files)}
    acquire_run_dir(options.run_dir, recipe, inputs)
    network: Any = questions_model(source, seed=recipe.seed, dropout=recipe.dropout)
    if recipe.lora:
        network = add_low_rank(network, recipe.lora, source)
    batches = batches_per_step(recipe.optimisation)
    steps = max(1, recipe.epochs * len(data.windows) // (recipe.sequences * batches))
    objective = QuestionObjective(
        network, data, recipe, steps=steps, batches=batches, seed=recipe.seed
    )
    train(objective, options, seed=recipe.seed, optimisation=recipe.rates)
    title = "An encoder fine-tuned for question answering"
    run = Run(title, source, files, recipe, options)
    return write_run(network, source.tokenizer, run)


def questions_model(source: Folder, *, seed: int, dropout: float) -> PreTrainedModel:
    """Return the model with a head for the start and the end of an answer."""
    return source.load(AutoModelForQuestionAnswering, seed=seed, dropout=dropout, num_labels=2)[0]


def read_question_data(
    files: list[Path],
    source: Folder,
    settings: QuestionsSettings,
    report: Report,
    *,
    measured: int | None = None,
) -> QuestionData:
    """Read the questions, split them by article, and cut them into windows.

    Args:
        measured: the most held-out questions, evenly spread; None: all.

    Raises:
        TrainError: there is no question to learn from, or windows do not fit.
    """
    learnt, held_out = _split_questions(files, settings)
    held_out = held_out[:: max(1, len(held_out) // measured)] if measured else held_out

    def cut(questions: Sequence[Question]) -> list[Window]:
        return make_windows(
            questions,
            source.text,
            source.special,
            tokens=settings.tokens,
            stride=settings.stride,
            question_tokens=settings.question_tokens,
        )

    data = QuestionData(cut(learnt), held_out, cut(held_out))
    report(
        f"{len(learnt):,} questions to learn from in {len(data.windows):,} windows; "
        f"{len(held_out):,} held out"
    )
    if not data.windows:
        raise TrainError(
            "every question is of a held-out article; lower held_out or give more articles"
        )
    return data


def _split_questions(
    files: list[Path], settings: QuestionsSettings
) -> tuple[list[Question], list[Question]]:
    """Return the questions to learn from, and the questions of held-out articles.

    A question whose answers have no position in the paragraph gives no label, so such a question
    is only evaluated.
    """
    learnt, held_out = [], []
    for question in read_questions(files):
        if question.impossible and not settings.unanswerable:
            continue
        if is_held_out(question.title, settings.held_out):
            held_out.append(question)
        elif question.impossible or question.is_placed:
            learnt.append(question)
    return learnt, held_out
