"""Fine-tuning for labels of texts and for tags of words.

Sources: Devlin et al. 2019, sections 4.1 and 5.3 (the first token of a word has its tag).
Shapes: B sequences of S tokens, N held-out rows, L labels of one set.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from cloze.export.errors import TrainError
from cloze.export.measure.labelled import OUTSIDE, TaggedSentence
from cloze.export.measure.metrics import (
    Calibration,
    calibrate,
    classification,
    entity_tags,
    multi_label,
    regression,
)
from cloze.export.train.adapters import add_low_rank
from cloze.export.train.batches import PaddedBatch, padded, padded_length, shuffled_batches
from cloze.export.train.card import Run, write_run
from cloze.export.train.documents import fingerprint
from cloze.export.train.folder import Folder, max_tokens
from cloze.export.train.label_data import LabelData, RowFiles, TagData, read_rows
from cloze.export.train.loop import batches_per_step, train
from cloze.export.train.objectives import initialise
from cloze.export.train.rows import Floats, Row, encode_rows, model_inputs, outputs_of
from cloze.export.train.run_dir import acquire_run_dir
from cloze.export.train.run_options import RunOptions
from cloze.export.train.task_recipe import LabelSettings, LabelsRecipe, TagsRecipe
from cloze.model_store.heads import sequence_classification, token_classification
from cloze.model_store.heads.label_sets import HEAD_SECTIONS, LabelSets
from cloze.model_store.heads.sequence_classification import SequenceLabels, SequenceLabelSet
from cloze.model_store.heads.token_classification import TokenLabels, as_iob2

CLASSES: Final = sequence_classification.HEAD.name
TAGS: Final = token_classification.HEAD.name

_IGNORED = -100
"""Target of a token without a label; `torch.nn.functional.cross_entropy` ignores it."""


@dataclass(frozen=True, slots=True)
class RowBatch(PaddedBatch):
    """Texts or sentences with what they should be given.

    Attributes:
        targets: int64 [B], a label's number; float32 [B, L], 1 for each label, or the number; or
            int64 [B, S], the number of each token's tag.
    """

    targets: Tensor


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The number and the order of batches of a run over rows."""

    steps: int
    batches: int
    seed: int


Data = TypeVar("Data", LabelData, TagData)


class RowObjective(ABC, Generic[Data]):
    """The part of an objective that labels and tags share.

    Args:
        columns: the logits of the label set, among those of the network.
    """

    def __init__(
        self,
        network: Any,
        source: Folder,
        data: Data,
        plan: RowPlan,
        columns: slice = slice(None),
    ) -> None:
        self.module, self.steps = network, plan.steps
        self._data: Data = data
        self._plan, self._columns = plan, columns
        self._config = network.config
        self._max_tokens = max_tokens(network)
        if data.settings.tokens > self._max_tokens:
            raise TrainError(
                f"texts of {data.settings.tokens} tokens exceed the checkpoint's "
                f"{self._max_tokens} positions"
            )
        rows = encode_rows(data.learnt, source.text, data.settings)
        self._held_out = encode_rows(data.held_out, source.text, data.settings)
        targets, weights = self.targets(rows, data.labels.labels)
        self._weights = torch.from_numpy(weights)
        self._rows = list(zip(rows, targets, strict=True))
        lengths = [len(row.input_ids) for row in rows]
        self._batches = shuffled_batches(lengths, data.settings.sequences, plan.seed)

    @abstractmethod
    def targets(
        self, rows: Sequence[Row], labels: Sequence[str]
    ) -> tuple[Sequence[NDArray[Any]], NDArray[np.float32]]:
        """Return what each row should be given (`RowBatch`), and the weight [L] of each label."""

    @abstractmethod
    def loss(self, batch: RowBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss, and the share of right choices."""

    @abstractmethod
    def figures(self, logits: Sequence[Floats]) -> dict[str, float]:
        """Return the figures of the logits of the held-out rows."""

    @abstractmethod
    def choices(self, logits: Sequence[Floats]) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the logits [N, L] of held-out choices, and what is right, bool [N, L]."""

    def batch(self, step: int, part: int) -> RowBatch:
        """Return the ``part``-th batch of a step."""
        chosen = [self._rows[i] for i in self._batches(step * self._plan.batches + part)]
        rows, targets = zip(*chosen, strict=True)
        ids, types = [row.input_ids for row in rows], [row.token_type_ids for row in rows]
        length = padded_length(max(map(len, ids)), self._max_tokens)
        padded_targets = [self.padded_target(target, length) for target in targets]
        return RowBatch(*padded(ids, types, length), torch.from_numpy(np.stack(padded_targets)))

    def padded_target(self, target: NDArray[Any], _: int) -> NDArray[Any]:
        """Return the target of a row in a batch of this length."""
        return target

    def logits(self, batch: PaddedBatch) -> Tensor:
        """Return the logits of the label set, float32 [B, L] of texts or [B, S, L] of tokens."""
        logits: Tensor = self.module(**model_inputs(batch, self._config)).logits
        return logits[..., self._columns].float()

    def evaluate(self, _: int) -> Mapping[str, float]:
        """Return the figures of held-out rows; none without such rows."""
        return self.figures(self._held_out_logits()) if self._held_out else {}

    def _held_out_logits(self) -> list[Floats]:
        size = self._data.settings.sequences
        return outputs_of(
            self.module, self._held_out, self.logits, size=size, max_tokens=self._max_tokens
        )

    def calibrate(self) -> Calibration | None:
        """Divide the classifier by the temperature of held-out rows; None: nothing to measure.

        The scores of weighted labels are not meant to be shares of the held-out rows.
        """
        if not self._held_out or self._data.settings.class_weights != "none":
            return None
        logits, gold = self.choices(self._held_out_logits())
        if not len(gold):
            return None
        several = getattr(self._data.labels, "problem_type", "") == "multi_label_classification"
        calibration = calibrate(logits, gold, independent=several)
        layer = label_layer(self.module)
        with torch.no_grad():
            layer.weight[self._columns] /= calibration.temperature
            layer.bias[self._columns] /= calibration.temperature
        return calibration


def label_layer(network: Any) -> nn.Linear:
    """Return the last linear layer, which has one row per label."""
    linears = [each for each in network.modules() if isinstance(each, nn.Linear)]
    labelled = [each for each in linears if each.out_features == network.config.num_labels]
    return labelled[-1]


class LabelObjective(RowObjective[LabelData]):
    """Cross-entropy of labels, or the squared error of a number."""

    @property
    def _problem(self) -> str:
        return self._data.labels.problem_type

    def targets(
        self, _: Sequence[Row], labels: Sequence[str]
    ) -> tuple[Sequence[NDArray[Any]], NDArray[np.float32]]:
        """See `RowObjective`."""
        data = self._data
        if self._problem == "regression":
            numbers = [np.array([row.score], np.float32) for row in data.learnt]
            return numbers, np.ones(1, np.float32)
        matrix = np.array([[label in row.labels for label in labels] for row in data.learnt])
        counts = matrix.sum(0)
        if self._problem == "multi_label_classification":
            balanced = (len(matrix) - counts) / np.maximum(counts, 1)
            weights = _class_weights(data.settings, labels, balanced)
            return list(matrix.astype(np.float32)), weights
        weights = _class_weights(data.settings, labels, _balanced(counts))
        return list(matrix.argmax(1)), weights

    def loss(self, batch: RowBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `RowObjective`."""
        logits, targets = self.logits(batch), batch.targets
        weights = self._weights.to(logits.device)
        if self._problem == "regression":
            return F.mse_loss(logits, targets), {}
        if self._problem == "multi_label_classification":
            loss = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights)
            return loss, {"accuracy": ((logits > 0) == (targets > 0)).float().mean()}
        loss = F.cross_entropy(logits, targets, weights)
        return loss, {"accuracy": (logits.argmax(1) == targets).float().mean()}

    def figures(self, logits: Sequence[Floats]) -> dict[str, float]:
        """See `RowObjective`."""
        scores, gold = self.choices(logits)
        if self._problem == "regression":
            return regression(scores[:, 0], [row.score for row in self._data.held_out])
        if self._problem == "multi_label_classification":
            return multi_label(scores, gold)
        return classification(scores, gold.argmax(1))

    def choices(self, logits: Sequence[Floats]) -> tuple[Floats, NDArray[np.bool_]]:
        """See `RowObjective`."""
        labels = self._data.labels.labels
        gold = [[label in row.labels for label in labels] for row in self._data.held_out]
        return np.stack(logits), np.array(gold, bool)

    def calibrate(self) -> Calibration | None:
        """See `RowObjective`; a number is not calibrated."""
        return None if self._problem == "regression" else super().calibrate()


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

    def targets(
        self, rows: Sequence[Row], labels: Sequence[str]
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

    def padded_target(self, target: NDArray[Any], length: int) -> NDArray[Any]:
        """See `RowObjective`."""
        return np.pad(target, (0, length - len(target)), constant_values=_IGNORED)

    def loss(self, batch: RowBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `RowObjective`."""
        logits, targets = self.logits(batch), batch.targets
        weights = self._weights.to(logits.device)
        labelled = targets != _IGNORED
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weights, reduction="sum")
        # The mean of a batch of words without a token is not a number.
        loss = total / weights[targets.clamp_min(0)][labelled].sum().clamp_min(1e-6)
        right = (logits.argmax(-1) == targets) & labelled
        return loss, {"accuracy": right.sum() / labelled.sum().clamp_min(1)}

    def figures(self, logits: Sequence[Floats]) -> dict[str, float]:
        """See `RowObjective`.

        The first token of a word decides its tag. A word that is cut off, or has no token, is
        outside.
        """
        labels, predicted = self._data.labels.labels, []
        rows = zip(self._data.held_out, self._held_out, logits, strict=True)
        for sentence, row, scores in rows:
            tags = [OUTSIDE] * len(sentence.words)
            for token in row.first_tokens():
                tags[row.word_of[token]] = labels[scores[token].argmax()]
            predicted.append(as_iob2(tags, labels))
        return entity_tags(predicted, [row.tags for row in self._data.held_out])

    def choices(self, logits: Sequence[Floats]) -> tuple[Floats, NDArray[np.bool_]]:
        """See `RowObjective`: the choices are those of the first tokens of words."""
        labels, scores, numbers = self._data.labels.labels, [], []
        rows = zip(self._data.held_out, self._held_out, logits, strict=True)
        for sentence, row, array in rows:
            firsts = row.first_tokens()
            scores.append(array[firsts])
            numbers += [labels.index(sentence.tags[row.word_of[token]]) for token in firsts]
        return np.concatenate(scores), np.eye(len(labels), dtype=bool)[numbers]


def _tag_targets(
    row: Row, sentence: TaggedSentence, number: Mapping[str, int], all_tokens: bool
) -> NDArray[np.int64]:
    """Return the number of each token's tag, int64 [S]."""
    targets = np.full(len(row.input_ids), _IGNORED, np.int64)
    if all_tokens:  # the later tokens of a word continue its entity
        for token in np.flatnonzero(row.word_of >= 0):
            tag = sentence.tags[row.word_of[token]]
            targets[token] = number[f"I-{tag[2:]}" if tag.startswith("B-") else tag]
    for token in row.first_tokens():
        targets[token] = number[sentence.tags[row.word_of[token]]]
    return targets


_FIGURES: Final = {
    "single_label_classification": "accuracy",
    "multi_label_classification": "macro_f1",
    "regression": "pearson",
}
TAG_FIGURE: Final = "entity_f1"


def main_figure(data: LabelData | TagData) -> str:
    """Return the name of the figure that says how good a model is."""
    if isinstance(data.labels, SequenceLabelSet):
        return _FIGURES[data.labels.problem_type]
    return TAG_FIGURE


def row_objective(
    network: Any,
    source: Folder,
    data: LabelData | TagData,
    plan: RowPlan,
    columns: slice = slice(None),
) -> LabelObjective | TagObjective:
    """Return the objective of rows."""
    if isinstance(data, LabelData):
        return LabelObjective(network, source, data, plan, columns)
    return TagObjective(network, source, data, plan, columns)


def labelled_model(
    source: Folder, sets: LabelSets, *, seed: int, dropout: float
) -> PreTrainedModel:
    """Return the model with a head of label sets; the logits of all sets lie side by side.

    A label of one of several sets has the name of its set before it.
    """
    names = [
        f"{each.name}/{label}" if sets.further else label
        for each in sets.sets
        for label in each.labels
    ]
    settings: dict[str, Any] = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }
    kind: Any = AutoModelForTokenClassification
    if isinstance(sets, SequenceLabels):
        kind = AutoModelForSequenceClassification
        settings["problem_type"] = sets.problem_type
    network, new = source.load(kind, seed=seed, dropout=dropout, **settings)
    if new:
        _begin_head(network, source)
    return network


def _begin_head(network: PreTrainedModel, source: Folder) -> None:
    """Give a new head random weights as large as our encoders'; see `initialise`.

    A pooler that has never learnt from pairs of texts is a part of the head. docs/decisions/0025
    has the measurements.
    """
    encoder: Any = network.base_model
    heads = [child for child in network.children() if child is not encoder]
    pooler = getattr(encoder, "pooler", None)
    if pooler is not None and not source.has_tensor("seq_relationship"):
        heads.append(pooler)
    for head in heads:
        initialise(head)


def label_sets(data: Sequence[LabelData | TagData]) -> dict[str, LabelSets]:
    """Return the label sets of rows by the name of their head, the default sets first."""
    sets: dict[str, LabelSets] = {}
    if classes := [each.labels for each in data if isinstance(each, LabelData)]:
        sets[CLASSES] = SequenceLabels(**dict(classes[0]), further=tuple(classes[1:]))
    if tags := [each.labels for each in data if isinstance(each, TagData)]:
        sets[TAGS] = TokenLabels(**dict(tags[0]), further=tuple(tags[1:]))
    return sets


def finetune_rows(
    source: Folder,
    files: RowFiles,
    recipe: LabelsRecipe | TagsRecipe,
    options: RunOptions,
) -> Path:
    """Fine-tune a model for labels of texts or of pairs, or for tags of words.

    Returns:
        The folder of the new model, which has only this head.

    Raises:
        DataError: the files or the recipe cannot be used, or the run fails, see `train`.
    """
    data = read_rows(files, recipe, options.report)
    ((head, sets),) = label_sets([data]).items()
    inputs = {"checkpoint": source.weights_sha256, "file of texts": fingerprint(files.all)}
    acquire_run_dir(options.run_dir, recipe, inputs)
    network: Any = labelled_model(source, sets, seed=recipe.seed, dropout=recipe.dropout)
    if recipe.lora:
        network = add_low_rank(network, recipe.lora, source)
    batches = batches_per_step(recipe.optimisation)
    steps = max(1, recipe.epochs * len(data.learnt) // (recipe.sequences * batches))
    objective = row_objective(network, source, data, RowPlan(steps, batches, recipe.seed))
    step = train(
        objective,
        options,
        seed=recipe.seed,
        optimisation=recipe.rates,
        figure=main_figure(data),
        patience=recipe.patience,
    )
    figures = {}
    if (calibration := objective.calibrate()) is not None:
        figures["calibration"] = str(calibration)
        options.report(str(calibration))
        calibrated = sets.calibrated(None, calibration.temperature)
        setattr(network.config, HEAD_SECTIONS, {head: calibrated.model_dump(mode="json")})
    title = "An encoder fine-tuned for labels"
    run = Run(title, source, files.all, recipe, options, step, figures)
    return write_run(network, source.tokenizer, run)
