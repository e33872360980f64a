"""Labels of texts, tags of words, and answers: what is learnt, and which rows are held out.

Sources: Devlin et al. 2019, sections 4.1 to 4.3 and 5.3 (the first token of a word has its tag).
Shapes: B sequences of S tokens, N held-out rows, L labels of one set.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from cloze.export.errors import DataError, Report, TrainError
from cloze.export.measure import labelled, squad
from cloze.export.measure.documents import is_held_out
from cloze.export.measure.metrics import Calibration, calibrate, squad_answers
from cloze.export.train.batches import PaddedBatch
from cloze.export.train.folder import Folder
from cloze.export.train.recipe import LabelSettings, QuestionsSettings, TagSettings
from cloze.export.train.rows import IGNORED, Floats, TaskRows
from cloze.model_store.heads import sequence_classification, span, token_classification
from cloze.model_store.heads.label_sets import LabelSet
from cloze.model_store.heads.sequence_classification import SequenceLabelSet

CLASSES: Final = sequence_classification.HEAD.name
TAGS: Final = token_classification.HEAD.name

_FIGURES: Final = {
    None: "entity_f1",
    "single_label_classification": "accuracy",
    "multi_label_classification": "macro_f1",
    "regression": "pearson",
}

Row = TypeVar("Row", bound=labelled.LabelledText | labelled.TaggedSentence)
Labels = TypeVar("Labels", bound=LabelSet)
Spread = TypeVar("Spread")


class _LabelledRows(TaskRows, Generic[Row, Labels]):
    """Rows with labels of one set; see `encode_rows` for the errors."""

    settings: LabelSettings

    def __init__(
        self,
        learnt: Sequence[Row],
        held_out: Sequence[Row],
        labels: Labels,
        settings: LabelSettings,
        text: Tokenizer,
    ) -> None:
        cut = settings.long_text == "truncate"
        encoded = (
            labelled.encode_rows(each, text, settings.tokens, cut=cut)
            for each in (learnt, held_out)
        )
        super().__init__(settings, *encoded)
        self.labels, self._learnt, self._held_out = labels, learnt, held_out
        self.figure = _FIGURES[getattr(labels, "problem_type", None)]
        self.targets, balanced = self._learn()
        weights, names = settings.class_weights, labels.labels
        if weights != "balanced":
            table = weights if isinstance(weights, dict) else {}
            balanced = np.array([table.get(name, 1.0) for name in names])
        self.weights = torch.from_numpy(balanced.astype(np.float32))

    @abstractmethod
    def _learn(self) -> tuple[Sequence[NDArray[Any]], NDArray[np.floating]]:
        """Return the targets, and weights [L] with which rare labels count as common ones do."""


class LabelRows(_LabelledRows[labelled.LabelledText, SequenceLabelSet]):
    """Texts with labels: cross-entropy of labels, or the squared error of a number."""

    head = CLASSES

    def _learn(self) -> tuple[Sequence[NDArray[Any]], NDArray[np.floating]]:
        matrix = labelled.label_matrix(self._learnt, self.labels.labels)
        counts = matrix.sum(0)
        if self.labels.problem_type == "regression":
            return [np.array([row.label], np.float32) for row in self._learnt], np.ones(1)
        if self.labels.problem_type == "multi_label_classification":
            balanced = (len(matrix) - counts) / np.maximum(counts, 1)
            return list(matrix.astype(np.float32)), balanced
        return list(matrix.argmax(1)[:, None]), _balanced(counts)

    def loss(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `TaskRows`."""
        weights = self.weights.to(logits.device)
        if self.labels.problem_type == "regression":
            return F.mse_loss(logits, targets), {}
        if self.labels.problem_type == "multi_label_classification":
            loss = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights)
            return loss, {"accuracy": ((logits > 0) == (targets > 0)).float().mean()}
        numbers = targets[:, 0]
        loss = F.cross_entropy(logits, numbers, weights)
        return loss, {"accuracy": (logits.argmax(1) == numbers).float().mean()}

    def figures(self, logits: Sequence[Floats]) -> Mapping[str, float]:
        """See `TaskRows`."""
        return labelled.measure_labels(self._held_out, logits, self.labels)

    def calibration(self, logits: Sequence[Floats]) -> Calibration | None:
        """See `TaskRows`; scores of weighted labels are not meant to be shares of the rows."""
        if self.labels.problem_type == "regression" or self.settings.class_weights != "none":
            return None
        gold = labelled.label_matrix(self._held_out, self.labels.labels)
        independent = self.labels.problem_type == "multi_label_classification"
        return calibrate(np.stack(logits), gold, independent=independent)


class TagRows(_LabelledRows[labelled.TaggedSentence, LabelSet]):
    """Sentences with tags: cross-entropy of the tags of words."""

    head = TAGS
    settings: TagSettings

    def _learn(self) -> tuple[Sequence[NDArray[Any]], NDArray[np.floating]]:
        number = {tag: at for at, tag in enumerate(self.labels.labels)}
        all_tokens = self.settings.subwords == "all"
        targets = [
            tag_targets(row, sentence, number, all_tokens)
            for row, sentence in zip(self.rows, self._learnt, strict=True)
        ]
        flat = np.concatenate(targets)
        counts = np.bincount(flat[flat != IGNORED], minlength=len(number))
        return targets, _balanced(counts)

    def loss(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `TaskRows`."""
        weights, labelled = self.weights.to(logits.device), targets != IGNORED
        logits = logits[:, : targets.shape[1]]  # the others are padding
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weights, reduction="sum")
        # The mean of a batch of words without a token is not a number.
        loss = total / (weights[targets.clamp_min(0)] * labelled).sum().clamp_min(1e-6)
        right = (logits.argmax(-1) == targets) & labelled
        return loss, {"accuracy": right.sum() / labelled.sum().clamp_min(1)}

    def figures(self, logits: Sequence[Floats]) -> Mapping[str, float]:
        """See `TaskRows`."""
        return labelled.measure_tags(self._held_out, self.held_out_rows, logits, self.labels)

    def calibration(self, logits: Sequence[Floats]) -> Calibration | None:
        """See `TaskRows`; the choices are those of the first tokens of words."""
        labels, scores, numbers = self.labels.labels, [], []
        for sentence, row, array in zip(self._held_out, self.held_out_rows, logits, strict=True):
            firsts = row.first_tokens()
            scores.append(array[firsts])
            numbers += [labels.index(sentence.tags[row.word_of[token]]) for token in firsts]
        if self.settings.class_weights != "none" or not numbers:
            return None
        gold = np.eye(len(labels), dtype=bool)[numbers]
        return calibrate(np.concatenate(scores), gold, independent=False)


def tag_targets(
    row: labelled.EncodedRow,
    sentence: labelled.TaggedSentence,
    number: Mapping[str, int],
    all_tokens: bool,
) -> NDArray[np.int64]:
    """Return the number of each token's tag, int64 [S]."""
    targets = np.full(len(row.input_ids), IGNORED, np.int64)
    if all_tokens:  # the later tokens of a word continue its entity
        for token in np.flatnonzero(row.word_of >= 0):
            tag = sentence.tags[row.word_of[token]]
            targets[token] = number[f"I-{tag[2:]}" if tag.startswith("B-") else tag]
    for token in row.first_tokens():
        targets[token] = number[sentence.tags[row.word_of[token]]]
    return targets


def _balanced(counts: NDArray[np.int64]) -> NDArray[np.floating]:
    """Return weights [L] in inverse proportion to counts [L], with a mean of 1 per row."""
    present = max(1, int((counts > 0).sum()))
    weights: NDArray[np.floating] = counts.sum() / (present * np.maximum(counts, 1))
    return weights


def read_rows(
    files: Sequence[Path],
    held_out_files: Sequence[Path],
    settings: LabelSettings,
    text: Tokenizer,
    report: Report,
    *,
    name: str | None = None,
    measured: int | None = None,
) -> LabelRows | TagRows:
    """Read all rows of a task, whose settings say what the rows are.

    Args:
        held_out_files: files to measure on; empty: a share of the others.
        name: name of the label set; None: it is the only one.
        measured: the most held-out rows, evenly spread; None: all.

    Raises:
        DataError: a file, its labels, or the settings cannot be used.
    """
    if isinstance(settings, TagSettings):
        sentences, held_out_sentences = _read(labelled.read_tagged, files, held_out_files, settings)
        types = labelled.label_names(sentences, held_out_sentences, report, least=1)
        tags = LabelSet(name=name, labels=labelled.tag_names(types))
        _check_weights(settings, tags.labels)
        return TagRows(sentences, _spread(held_out_sentences, measured), tags, settings, text)
    learnt, held_out = _read(labelled.read_labelled, files, held_out_files, settings)
    first, problem = learnt[0], learnt[0].problem
    if held_out and held_out[0].problem != problem:
        raise DataError(f"{held_out[0].at} is {held_out[0].kind}, but {first.at} is {first.kind}")
    least = 2 if problem == "single_label_classification" else 1
    names = labelled.label_names(learnt, held_out, report, least=least)
    if problem == "regression" and settings.class_weights != "none":
        raise TrainError(f"{first.at} has a number, but class_weights are weights of labels")
    _check_weights(settings, names)
    labels = SequenceLabelSet(name=name, labels=names, problem_type=problem)
    return LabelRows(learnt, _spread(held_out, measured), labels, settings, text)


def _read(
    read: Callable[[Sequence[Path]], list[Row]],
    files: Sequence[Path],
    held_out_files: Sequence[Path],
    settings: LabelSettings,
) -> tuple[list[Row], list[Row]]:
    """Return the rows to learn from, and the held-out rows."""
    rows = read(files)
    if held_out_files:
        return rows, read(held_out_files)
    parts: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        parts[is_held_out(row.text, settings.held_out)].append(row)
    if not parts[0]:
        raise TrainError(f"{rows[0].at}: all rows are held out; lower held_out or give more rows")
    return parts


def _spread(rows: list[Spread], count: int | None) -> list[Spread]:
    """Return about ``count`` evenly spread rows; None: all."""
    return rows[:: max(1, len(rows) // count)] if count else rows


def _check_weights(settings: LabelSettings, labels: Sequence[str]) -> None:
    if isinstance(settings.class_weights, dict):
        for label in settings.class_weights:
            if label not in labels:
                raise TrainError(f"class_weights: no row to learn from has the label {label!r}")


# ---- answers -------------------------------------------------------------------------------------

SPAN: Final = span.HEAD.name


class WindowRows(TaskRows):
    """Questions as windows, in which start and end of the answer are each chosen among S tokens."""

    head, figure = SPAN, "f1"

    def __init__(
        self,
        settings: QuestionsSettings,
        windows: list[squad.Window],
        held_out_windows: list[squad.Window],
        held_out: list[squad.Question],
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
        answers = squad.answers_of(
            questions, squad.best_guesses(questions, self.held_out_rows, logits)
        )
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
    learnt: list[squad.Question] = []
    held_out: list[squad.Question] = []
    for question in squad.read_questions(files):
        if question.impossible and not settings.unanswerable:
            continue
        if is_held_out(question.title, settings.held_out):
            held_out.append(question)
        elif question.impossible or question.is_placed:
            learnt.append(question)
    held_out = _spread(held_out, measured)
    windows, held_out_windows = (
        squad.make_windows(
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
