"""Fine-tuning for labels of texts and for tags of words.

Sources: Devlin et al. 2019, sections 4.1 and 5.3 (the first token of a word has its tag).
Shapes: B sequences of S tokens, L labels of one set.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cloze.export.errors import TrainError
from cloze.export.evaluation.calibration import Calibration, calibrate
from cloze.export.evaluation.labelled import TaggedSentence
from cloze.export.evaluation.labels import (
    EncodedRow,
    LengthRule,
    encode_sentences,
    encode_texts,
    first_tokens,
    label_choices,
    label_matrix,
    measure_labels,
    measure_tags,
    tag_choices,
)
from cloze.export.evaluation.scorer import Floats
from cloze.export.load.checkpoint import Checkpoint
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.export.model import Model, TorchScorer
from cloze.export.train.batches import PaddedBatch, padded, padded_length, shuffled_batches
from cloze.export.train.card import Run, finish_run
from cloze.export.train.documents import fingerprint
from cloze.export.train.label_data import (
    LabelData,
    RowFiles,
    TagData,
    read_rows,
)
from cloze.export.train.loop import Stopping, train
from cloze.export.train.low_rank import add_low_rank
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.export.train.start import start_from
from cloze.export.train.task_recipe import LabelSettings, LabelsRecipe, TagsRecipe
from cloze.model_store.heads import sequence_classification, token_classification
from cloze.model_store.heads.label_sets import LabelSets
from cloze.model_store.heads.sequence_classification import SequenceLabels, SequenceLabelSet
from cloze.model_store.heads.token_classification import TokenLabels

CLASSES = sequence_classification.HEAD.name
TAGS = token_classification.HEAD.name

_IGNORED = -100
"""Target of a token without a label; `torch.nn.functional.cross_entropy` ignores it."""


def head_options(data: Sequence[LabelData | TagData]) -> dict[str, LabelSets]:
    """Return the options of the heads with the label sets of rows, the default first."""
    options: dict[str, LabelSets] = {}
    if classes := [each.labels for each in data if isinstance(each, LabelData)]:
        options[CLASSES] = SequenceLabels(**dict(classes[0]), further=tuple(classes[1:]))
    if tags := [each.labels for each in data if isinstance(each, TagData)]:
        options[TAGS] = TokenLabels(**dict(tags[0]), further=tuple(tags[1:]))
    return options


@dataclass(frozen=True, slots=True)
class RowBatch(PaddedBatch):
    """Texts or sentences with what they should be given.

    Attributes:
        targets: int64 [B], a label's number; float32 [B, L], 1 for each label, or the number; or
            int64 [B, S], the number of each token's tag.
    """

    targets: Tensor


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The number and the order of batches of a run over rows."""

    steps: int
    accumulation: int
    seed: int


Data = TypeVar("Data", LabelData, TagData)


class RowObjective(ABC, Generic[Data]):
    """The part of an objective that labels and tags share.

    Attributes:
        head: name of the head.
        encode: makes sequences of rows.
        measure: returns the figures of held-out rows.
        choices: returns the logits of held-out rows, and what they should be.
        independent: whether a row may have several labels.
    """

    head: ClassVar[str]
    encode: ClassVar[Callable[..., list[EncodedRow]]]
    measure: ClassVar[Callable[..., dict[str, float]]]
    choices: ClassVar[Callable[..., tuple[Floats, NDArray[np.bool_]]]]
    independent = False

    def __init__(
        self, model: Model, tokenizer: CheckpointTokenizer, data: Data, plan: BatchPlan
    ) -> None:
        self.module, self.steps = model, plan.steps
        self._accumulation = plan.accumulation
        self._data: Data = data
        self._chosen = model.options[self.head].choose(data.labels.name)
        labels, self._columns = self._chosen
        rule = _length_rule(model, data.settings)
        rows = self.encode(data.learnt, tokenizer, rule)
        self._held_out = self.encode(data.held_out, tokenizer, rule)
        targets, weights = self.targets(rows, labels.labels)
        self._weights = torch.from_numpy(weights)
        self._rows = list(zip(rows, targets, strict=True))
        lengths = [len(row.input_ids) for row in rows]
        self._batches = shuffled_batches(lengths, data.settings.sequences, plan.seed)

    @abstractmethod
    def targets(
        self, rows: Sequence[EncodedRow], labels: Sequence[str]
    ) -> tuple[Sequence[NDArray[Any]], NDArray[np.float32]]:
        """Return what each row should be given (`RowBatch`), and the weight [L] of each label."""

    def batch(self, step: int, part: int) -> RowBatch:
        """Return the ``part``-th batch of a step."""
        chosen = [self._rows[i] for i in self._batches(step * self._accumulation + part)]
        rows, targets = zip(*chosen, strict=True)
        ids, types = [row.input_ids for row in rows], [row.token_type_ids for row in rows]
        length = padded_length(max(map(len, ids)), self.module.config.max_positions)
        if self.head == TAGS:
            targets = tuple(_padded_targets(target, length) for target in targets)
        return RowBatch(*padded(ids, types, length), torch.from_numpy(np.stack(targets)))

    def logits(self, batch: RowBatch) -> Tensor:
        """Return the logits of the label set, float32 [B, L] of texts or [B, S, L] of tokens."""
        hidden = self.module(batch.input_ids, batch.token_type_ids, batch.attention_mask)
        rows = hidden if self.head == TAGS else hidden[:, 0]
        logits: Tensor = getattr(self.module, self.head)(rows)
        return logits[..., self._columns].float()

    def evaluate(self, _: int) -> Mapping[str, float]:
        """Return the figures of held-out rows; see `measure_labels` and `measure_tags`."""
        if not self._held_out:
            return {}
        return self.measure(self._data.held_out, self._held_out, self._scorer(), self._chosen)

    def calibrate(self) -> Calibration | None:
        """Scale the logits by the temperature of held-out rows; None: nothing to measure.

        The scores of weighted labels are not meant to be shares of the held-out rows. The
        classifier is divided by the temperature, so the checkpoint has the scores in transformers
        too, and a server computes nothing more.
        """
        if not self._held_out or self._data.settings.class_weights != "none":
            return None
        rows = self._data.held_out
        logits, gold = self.choices(rows, self._held_out, self._scorer(), self._chosen)
        if not len(gold):
            return None
        calibration = calibrate(logits, gold, independent=self.independent)
        self._divide_by(calibration.temperature)
        return calibration

    def _divide_by(self, temperature: float) -> None:
        classifier = getattr(self.module, self.head).classifier
        with torch.no_grad():
            classifier.weight[self._columns] /= temperature
            classifier.bias[self._columns] /= temperature
        options = self.module.options[self.head]
        self.module.options[self.head] = options.calibrated(self._data.labels.name, temperature)

    def _scorer(self) -> TorchScorer:
        return TorchScorer(self.module, next(self.module.parameters()).device)


def _padded_targets(target: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    return np.pad(target, (0, length - len(target)), constant_values=_IGNORED)


class LabelObjective(RowObjective[LabelData]):
    """Cross-entropy of labels, or the squared error of a number."""

    head = CLASSES
    encode = staticmethod(encode_texts)
    measure = staticmethod(measure_labels)
    choices = staticmethod(label_choices)

    def __init__(
        self, model: Model, tokenizer: CheckpointTokenizer, data: LabelData, plan: BatchPlan
    ) -> None:
        super().__init__(model, tokenizer, data, plan)
        self._problem = data.labels.problem_type
        self.independent = self._problem == "multi_label_classification"

    def targets(
        self, _: Sequence[EncodedRow], labels: Sequence[str]
    ) -> tuple[Sequence[NDArray[Any]], NDArray[np.float32]]:
        """See `RowObjective`."""
        data = self._data
        if data.labels.problem_type == "regression":
            numbers = [np.array([row.score], np.float32) for row in data.learnt]
            return numbers, np.ones(1, np.float32)
        matrix = label_matrix(data.learnt, labels)  # [N, L]
        counts = matrix.sum(0)
        if data.labels.problem_type == "multi_label_classification":
            balanced = (len(matrix) - counts) / np.maximum(counts, 1)
            weights = _class_weights(data.settings, labels, balanced)
            return list(matrix.astype(np.float32)), weights
        weights = _class_weights(data.settings, labels, _balanced(counts))
        return [np.int64(label) for label in matrix.argmax(1)], weights  # type: ignore[misc]

    def loss(self, batch: RowBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss, and the share of right labels."""
        logits, targets = self.logits(batch), batch.targets
        weights = self._weights.to(logits.device)
        if self._problem == "regression":
            return F.mse_loss(logits, targets), {}
        if self._problem == "multi_label_classification":
            loss = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights)
            return loss, {"accuracy": ((logits > 0) == (targets > 0)).float().mean()}
        loss = F.cross_entropy(logits, targets, weights)
        return loss, {"accuracy": (logits.argmax(1) == targets).float().mean()}

    def calibrate(self) -> Calibration | None:
        """See `RowObjective`; a number is not calibrated."""
        return None if self._problem == "regression" else super().calibrate()


def _length_rule(model: Model, settings: LabelSettings) -> LengthRule:
    positions = model.config.max_positions
    if settings.tokens > positions:
        raise TrainError(
            f"texts of {settings.tokens} tokens exceed the checkpoint's {positions} positions"
        )
    return LengthRule(settings.tokens, settings.long_text == "truncate")


def _balanced(counts: NDArray[np.int64]) -> NDArray[np.floating]:
    """Return weights [L] in inverse proportion to counts [L], with a mean of 1 per row."""
    present = max(1, int((counts > 0).sum()))
    weights: NDArray[np.floating] = counts.sum() / (present * np.maximum(counts, 1))
    return weights


def _class_weights(
    settings: LabelSettings, labels: Sequence[str], balanced: NDArray[np.floating]
) -> NDArray[np.float32]:
    given = settings.class_weights
    if given == "balanced":
        return balanced.astype(np.float32)
    table = given if isinstance(given, dict) else {}
    return np.array([table.get(label, 1.0) for label in labels], np.float32)


class TagObjective(RowObjective[TagData]):
    """Cross-entropy of the tags of words."""

    head = TAGS
    encode = staticmethod(encode_sentences)
    measure = staticmethod(measure_tags)
    choices = staticmethod(tag_choices)

    def targets(
        self, rows: Sequence[EncodedRow], labels: Sequence[str]
    ) -> tuple[Sequence[NDArray[Any]], NDArray[np.float32]]:
        """See `RowObjective`."""
        settings, number = self._data.settings, {tag: at for at, tag in enumerate(labels)}
        targets = [
            _tag_targets(row, sentence, number, settings.subwords == "all")
            for row, sentence in zip(rows, self._data.learnt, strict=True)
        ]
        flat = np.concatenate(targets)
        counts = np.bincount(flat[flat != _IGNORED], minlength=len(number))
        return targets, _class_weights(settings, labels, _balanced(counts))

    def loss(self, batch: RowBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss, and the share of right tags."""
        logits, targets = self.logits(batch), batch.targets
        weights = self._weights.to(logits.device)
        labelled = targets != _IGNORED
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weights, reduction="sum")
        # The mean of a batch of words without a token is not a number.
        loss = total / weights[targets.clamp_min(0)][labelled].sum().clamp_min(1e-6)
        right = (logits.argmax(-1) == targets) & labelled
        return loss, {"accuracy": right.sum() / labelled.sum().clamp_min(1)}


def _tag_targets(
    row: EncodedRow, sentence: TaggedSentence, number: Mapping[str, int], all_tokens: bool
) -> NDArray[np.int64]:
    """Return the number of each token's tag, int64 [S]."""
    firsts = first_tokens(row.word_of)
    targets = np.full(len(row.input_ids), _IGNORED, np.int64)
    for token in np.flatnonzero(row.word_of >= 0):
        tag = sentence.tags[row.word_of[token]]
        if firsts[token]:
            targets[token] = number[tag]
        elif all_tokens:
            targets[token] = number[tag.replace("B-", "I-", 1) if tag[:2] == "B-" else tag]
    return targets


_FIGURES = {
    "single_label_classification": "accuracy",
    "multi_label_classification": "macro_f1",
    "regression": "pearson",
}
TAG_FIGURE = "entity_f1"


def main_figure(data: LabelData | TagData) -> str:
    """Return the name of the figure that says how good a model is."""
    if isinstance(data.labels, SequenceLabelSet):
        return _FIGURES[data.labels.problem_type]
    return TAG_FIGURE


def row_objective(
    model: Model, tokenizer: CheckpointTokenizer, data: LabelData | TagData, plan: BatchPlan
) -> LabelObjective | TagObjective:
    """Return the objective of rows."""
    if isinstance(data, LabelData):
        return LabelObjective(model, tokenizer, data, plan)
    return TagObjective(model, tokenizer, data, plan)


def finetune_rows(
    checkpoint: Checkpoint,
    files: RowFiles,
    recipe: LabelsRecipe | TagsRecipe,
    options: RunOptions,
) -> Path:
    """Fine-tune a checkpoint for labels of texts or of pairs, or for tags of words.

    Returns:
        The folder of the new checkpoint, which has only this head.

    Raises:
        DataError: the files or the recipe cannot be used, or the run fails, see `train`.
    """
    data = read_rows(files, recipe, options.report)
    labels = head_options([data])
    inputs = {
        "checkpoint": checkpoint.source.weights_sha256,
        "file of texts": fingerprint(files.all),
    }
    acquire_run_dir(options.run_dir, recipe, inputs)
    model = start_from(checkpoint, labels, dropout=recipe.dropout, seed=recipe.seed, options=labels)
    if recipe.lora:
        add_low_rank(model, recipe.lora, labels)
    objective = row_objective(model, checkpoint.tokenizer, data, _plan(len(data.learnt), recipe))
    step = train(
        objective,
        options,
        seed=recipe.seed,
        optimisation=recipe.rates,
        stopping=Stopping(main_figure(data), recipe.patience) if recipe.patience else None,
    )
    figures = {}
    if (calibration := objective.calibrate()) is not None:
        figures["calibration"] = str(calibration)
        options.report(str(calibration))
    source = checkpoint.source.location
    title = "An encoder fine-tuned for labels"
    run = Run(title, source, [checkpoint], files.all, recipe, options, step, figures)
    return finish_run(model, checkpoint.tokenizer, run)


def _plan(rows: int, recipe: LabelsRecipe | TagsRecipe) -> BatchPlan:
    accumulation = recipe.optimisation.accumulation
    steps = max(1, recipe.epochs * rows // (recipe.sequences * accumulation))
    return BatchPlan(steps, accumulation, recipe.seed)
