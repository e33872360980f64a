"""Fine-tuning for labels of texts and for tags of words.

Sources: Devlin et al. 2019, sections 4.1 and 5.3 (the first token of a word has its tag).
Shapes: B sequences of S tokens, L labels of one set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cloze.export.checkpoint import Checkpoint
from cloze.export.errors import TrainError
from cloze.export.evaluation.calibration import Calibration, calibrate
from cloze.export.evaluation.labelled import (
    TaggedSentence,
)
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
from cloze.export.model import Model, TorchScorer
from cloze.export.tokenizer import CheckpointTokenizer
from cloze.export.train.batches import PaddedBatch, padded, padded_length, shuffled_batches
from cloze.export.train.card import Run, finish_run
from cloze.export.train.documents import fingerprint
from cloze.export.train.label_data import (
    LabelData,
    RowFiles,
    TagData,
    read_label_data,
    read_tag_data,
)
from cloze.export.train.loop import Stopping, train
from cloze.export.train.low_rank import add_low_rank
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.export.train.start import start_from
from cloze.export.train.task_recipe import LabelSettings, LabelsRecipe, TagsRecipe
from cloze.model_store.heads import sequence_classification, token_classification
from cloze.model_store.heads.label_sets import LabelSet, LabelSets
from cloze.model_store.heads.sequence_classification import SequenceLabels, SequenceLabelSet
from cloze.model_store.heads.token_classification import TokenLabels

CLASSES = sequence_classification.HEAD.name
TAGS = token_classification.HEAD.name

_IGNORED = -100
"""Target of a token without a label; `torch.nn.functional.cross_entropy` ignores it."""


def head_options(
    classes: Sequence[SequenceLabelSet], tags: Sequence[LabelSet]
) -> dict[str, LabelSets]:
    """Return the options of the heads with these label sets, the default first."""
    options: dict[str, LabelSets] = {}
    if classes:
        first, *others = classes
        options[CLASSES] = SequenceLabels(**_fields(first), further=tuple(others))
    if tags:
        default, *further = tags
        options[TAGS] = TokenLabels(**_fields(default), further=tuple(further))
    return options


def _fields(labels: LabelSet) -> dict[str, Any]:
    return {name: getattr(labels, name) for name in type(labels).model_fields}


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


class RowObjective:
    """The part of an objective that labels and tags share: batches and logits of a label set.

    Args:
        head: name of the head, and the logits of the label set.
        rows: each row, and what it should be given, see `RowBatch`.
        sequences: rows per batch.
    """

    def __init__(
        self,
        model: Model,
        head: tuple[str, slice],
        rows: Sequence[tuple[EncodedRow, NDArray[Any]]],
        plan: BatchPlan,
        sequences: int,
    ) -> None:
        self.module, self.steps = model, plan.steps
        (self._head, self._columns), self._rows = head, rows
        self._accumulation = plan.accumulation
        lengths = [len(row.input_ids) for row, _ in rows]
        self._batches = shuffled_batches(lengths, sequences, plan.seed)

    def batch(self, step: int, part: int) -> RowBatch:
        """Return the ``part``-th batch of a step."""
        chosen = [self._rows[i] for i in self._batches(step * self._accumulation + part)]
        rows, targets = zip(*chosen, strict=True)
        ids, types = [row.input_ids for row in rows], [row.token_type_ids for row in rows]
        length = padded_length(max(map(len, ids)), self.module.config.max_positions)
        if self._head == TAGS:
            targets = tuple(_padded_targets(target, length) for target in targets)
        return RowBatch(*padded(ids, types, length), torch.from_numpy(np.stack(targets)))

    def logits(self, batch: RowBatch) -> Tensor:
        """Return the logits of the label set, float32 [B, L] of texts or [B, S, L] of tokens."""
        hidden = self.module(batch.input_ids, batch.token_type_ids, batch.attention_mask)
        rows = hidden if self._head == TAGS else hidden[:, 0]
        logits: Tensor = getattr(self.module, self._head)(rows)
        return logits[..., self._columns].float()

    def _divide_by(self, calibration: Calibration, name: str | None) -> None:
        """Divide the classifier of the label set by a temperature, and note it in the options.

        So the checkpoint has the scores in transformers too, and a server computes nothing more.
        """
        classifier, temperature = (
            getattr(self.module, self._head).classifier,
            calibration.temperature,
        )
        with torch.no_grad():
            classifier.weight[self._columns] /= temperature
            classifier.bias[self._columns] /= temperature
        options = self.module.options[self._head]
        self.module.options[self._head] = options.calibrated(name, temperature)


def _padded_targets(target: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    return np.pad(target, (0, length - len(target)), constant_values=_IGNORED)


class LabelObjective(RowObjective):
    """Cross-entropy of labels, or the squared error of a number."""

    def __init__(
        self, model: Model, tokenizer: CheckpointTokenizer, data: LabelData, plan: BatchPlan
    ) -> None:
        options = model.options[CLASSES]
        self._chosen = options.choose(data.labels.name)
        self._data, self._problem = data, data.labels.problem_type
        rule = _length_rule(model, data.settings)
        rows = encode_texts(data.learnt, tokenizer, rule)
        self._held_out = encode_texts(data.held_out, tokenizer, rule)
        targets, weights = _label_targets(data, self._chosen[0].labels)
        self._weights = torch.from_numpy(weights)
        pairs = list(zip(rows, targets, strict=True))
        super().__init__(model, (CLASSES, self._chosen[1]), pairs, plan, data.settings.sequences)

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

    def evaluate(self, _: int) -> Mapping[str, float]:
        """Return the figures of held-out texts; see `measure_labels`."""
        if not self._held_out:
            return {}
        scorer = TorchScorer(self.module, next(self.module.parameters()).device)
        return measure_labels(self._data.held_out, self._held_out, scorer, self._chosen)

    def calibrate(self) -> Calibration | None:
        """Scale the logits by the temperature of held-out texts; None: nothing to measure.

        The scores of weighted labels are not meant to be shares of the held-out texts.
        """
        is_weighted = self._data.settings.class_weights != "none"
        if not self._held_out or self._problem == "regression" or is_weighted:
            return None
        scorer = TorchScorer(self.module, next(self.module.parameters()).device)
        logits, gold = label_choices(self._data.held_out, self._held_out, scorer, self._chosen)
        independent = self._problem == "multi_label_classification"
        calibration = calibrate(logits, gold, independent=independent)
        self._divide_by(calibration, self._data.labels.name)
        return calibration


def _length_rule(model: Model, settings: LabelSettings) -> LengthRule:
    positions = model.config.max_positions
    if settings.tokens > positions:
        raise TrainError(
            f"texts of {settings.tokens} tokens exceed the checkpoint's {positions} positions"
        )
    return LengthRule(settings.tokens, settings.long_text == "truncate")


def _label_targets(
    data: LabelData, labels: Sequence[str]
) -> tuple[list[NDArray[Any]], NDArray[np.float32]]:
    """Return the target of each row, and the weight [L] of each label."""
    if data.labels.problem_type == "regression":
        return [np.array([row.score], np.float32) for row in data.learnt], np.ones(1, np.float32)
    matrix = label_matrix(data.learnt, labels)  # [N, L]
    counts = matrix.sum(0)
    if data.labels.problem_type == "multi_label_classification":
        balanced = (len(matrix) - counts) / np.maximum(counts, 1)
        weights = _class_weights(data.settings, labels, balanced)
        return list(matrix.astype(np.float32)), weights
    weights = _class_weights(data.settings, labels, _balanced(counts))
    return [np.int64(label) for label in matrix.argmax(1)], weights  # type: ignore[misc]


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


class TagObjective(RowObjective):
    """Cross-entropy of the tags of words."""

    def __init__(
        self, model: Model, tokenizer: CheckpointTokenizer, data: TagData, plan: BatchPlan
    ) -> None:
        options = model.options[TAGS]
        self._chosen = options.choose(data.labels.name)
        self._data = data
        rule = _length_rule(model, data.settings)
        encoded = encode_sentences(data.learnt, tokenizer, rule)
        self._held_out = encode_sentences(data.held_out, tokenizer, rule)
        number = {tag: at for at, tag in enumerate(self._chosen[0].labels)}
        rows = [
            (row, _tag_targets(row, sentence, number, data.settings.subwords == "all"))
            for row, sentence in zip(encoded, data.learnt, strict=True)
        ]
        counts = np.zeros(len(number), np.int64)
        for _, targets in rows:
            np.add.at(counts, targets[targets != _IGNORED], 1)
        weights = _class_weights(data.settings, list(number), _balanced(counts))
        self._weights = torch.from_numpy(weights)
        super().__init__(model, (TAGS, self._chosen[1]), rows, plan, data.settings.sequences)

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

    def evaluate(self, _: int) -> Mapping[str, float]:
        """Return the figures of held-out sentences; see `measure_tags`."""
        if not self._held_out:
            return {}
        scorer = TorchScorer(self.module, next(self.module.parameters()).device)
        return measure_tags(self._data.held_out, self._held_out, scorer, self._chosen)

    def calibrate(self) -> Calibration | None:
        """Scale the logits by the temperature of held-out words; see `LabelObjective`."""
        if not self._held_out or self._data.settings.class_weights != "none":
            return None
        scorer = TorchScorer(self.module, next(self.module.parameters()).device)
        logits, gold = tag_choices(self._data.held_out, self._held_out, scorer, self._chosen)
        if not len(gold):
            return None
        calibration = calibrate(logits, gold, independent=False)
        self._divide_by(calibration, self._data.labels.name)
        return calibration


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


def finetune_labels(
    checkpoint: Checkpoint, files: RowFiles, recipe: LabelsRecipe, options: RunOptions
) -> Path:
    """Fine-tune a checkpoint for labels of texts or of pairs.

    Returns:
        The folder of the new checkpoint, which has only this head.

    Raises:
        DataError: the files or the recipe cannot be used, or the run fails, see `train`.
    """
    data = read_label_data(files, recipe, options.report)
    model = _start(checkpoint, files, head_options([data.labels], []), recipe, options)
    plan = _plan(len(data.learnt), recipe)
    objective = LabelObjective(model, checkpoint.tokenizer, data, plan)
    return _finish(objective, checkpoint, files, main_figure(data), recipe, options)


def finetune_tags(
    checkpoint: Checkpoint, files: RowFiles, recipe: TagsRecipe, options: RunOptions
) -> Path:
    """Fine-tune a checkpoint for tags of words.

    Returns:
        The folder of the new checkpoint, which has only this head.

    Raises:
        DataError: the files or the recipe cannot be used, or the run fails, see `train`.
    """
    data = read_tag_data(files, recipe, options.report)
    model = _start(checkpoint, files, head_options([], [data.labels]), recipe, options)
    plan = _plan(len(data.learnt), recipe)
    objective = TagObjective(model, checkpoint.tokenizer, data, plan)
    return _finish(objective, checkpoint, files, main_figure(data), recipe, options)


def _plan(rows: int, recipe: LabelsRecipe | TagsRecipe) -> BatchPlan:
    accumulation = recipe.optimisation.accumulation
    steps = max(1, recipe.epochs * rows // (recipe.sequences * accumulation))
    return BatchPlan(steps, accumulation, recipe.seed)


def _start(
    checkpoint: Checkpoint,
    files: RowFiles,
    labels: Mapping[str, LabelSets],
    recipe: LabelsRecipe | TagsRecipe,
    options: RunOptions,
) -> Model:
    inputs = {
        "checkpoint": checkpoint.source.weights_sha256,
        "file of texts": fingerprint(files.all),
    }
    acquire_run_dir(options.run_dir, recipe, inputs)
    model = start_from(checkpoint, labels, dropout=recipe.dropout, seed=recipe.seed, options=labels)
    if recipe.lora:
        add_low_rank(model, recipe.lora, labels)
    return model


def _finish(
    objective: LabelObjective | TagObjective,
    checkpoint: Checkpoint,
    files: RowFiles,
    figure: str,
    recipe: LabelsRecipe | TagsRecipe,
    options: RunOptions,
) -> Path:
    """Train, and write the checkpoint with its card."""
    stopping = Stopping(figure, recipe.patience) if recipe.patience else None
    step = train(
        objective,
        options,
        seed=recipe.seed,
        optimisation=recipe.rates,
        stopping=stopping,
    )
    figures = {}
    if (calibration := objective.calibrate()) is not None:
        figures["calibration"] = str(calibration)
        options.report(str(calibration))
    source = checkpoint.source.location
    title = "An encoder fine-tuned for labels"
    run = Run(title, source, [checkpoint], files.all, recipe, options, step, figures)
    return finish_run(objective.module, checkpoint.tokenizer, run)
