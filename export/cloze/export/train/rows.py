"""What all tasks on rows share: batches with targets, and what a model computes of held-out rows.

A row is a text, a pair, a sentence or a window. Shapes: B sequences of S tokens, L logits.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

from cloze.export.errors import TrainError
from cloze.export.measure.metrics import Calibration
from cloze.export.train.batches import PaddedBatch, padded, padded_length, shuffled_batches
from cloze.export.train.folder import has_token_types, max_tokens
from cloze.export.train.recipe import LabelSettings, QuestionsSettings

Floats = NDArray[np.float32]
IGNORED: Final = -100
"""Target of a token without a label; `torch.nn.functional.cross_entropy` ignores it."""


class TaskRows(ABC):
    """The rows of a task, what a model learns from them, and how good a model is on others.

    Attributes:
        head: name of the head that learns the task.
        figure: name of the figure that says how good a model is.
        rows: the rows to learn from, with ``input_ids`` and ``token_type_ids``, int64 [S] each.
        held_out_rows: the rows to measure on.
        targets: what a model should give for each row to learn from: [L], or [S] for tokens.
    """

    head: ClassVar[str]
    figure: str
    targets: Sequence[NDArray[Any]]

    def __init__(
        self,
        settings: LabelSettings | QuestionsSettings,
        rows: Sequence[Any],
        held_out_rows: Sequence[Any],
    ) -> None:
        self.settings, self.rows, self.held_out_rows = settings, rows, held_out_rows

    def logits(self, output: Any, _: PaddedBatch) -> Tensor:
        """Return the logits among the output of a model of transformers: [B, L] or [B, S, L]."""
        logits: Tensor = output.logits
        return logits

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss, and the share of right choices."""

    @abstractmethod
    def figures(self, logits: Sequence[Floats]) -> Mapping[str, float]:
        """Return the figures of the logits of the held-out rows."""

    def calibration(self, _: Sequence[Floats]) -> Calibration | None:
        """Return the temperature of the logits of the held-out rows; None: they have none."""
        return None


@dataclass(frozen=True, slots=True)
class RowBatch(PaddedBatch):
    """Rows with what a model should give for them: [B, L], or [B, S] with `IGNORED`."""

    targets: Tensor


class RowObjective:
    """Implements `loop.Objective` for the rows of a task.

    Args:
        batches: batches per step.
        columns: the logits of the task, among those of the network.
    """

    def __init__(
        self,
        network: Any,
        task: TaskRows,
        *,
        steps: int,
        batches: int,
        seed: int,
        columns: slice = slice(None),
    ) -> None:
        self.module, self.steps, self.task = network, steps, task
        self._batches_per_step, self._columns = batches, columns
        self._max_tokens = max_tokens(network)
        if task.settings.tokens > self._max_tokens:
            raise TrainError(
                f"the recipe's tokens = {task.settings.tokens} exceed the checkpoint's "
                f"{self._max_tokens} positions; give a recipe with tokens = {self._max_tokens}"
            )
        lengths = [len(row.input_ids) for row in task.rows]
        self._batches = shuffled_batches(lengths, task.settings.sequences, seed)

    def batch(self, step: int, part: int) -> RowBatch:
        """Return the ``part``-th batch of a step."""
        chosen = self._batches(step * self._batches_per_step + part)
        ids, types = ([getattr(self.task.rows[i], name) for i in chosen] for name in _FIELDS)
        length = padded_length(max(map(len, ids)), self._max_tokens)
        targets = [torch.from_numpy(self.task.targets[i]) for i in chosen]
        padded_targets = pad_sequence(targets, batch_first=True, padding_value=IGNORED)
        return RowBatch(*padded(ids, types, length), padded_targets)

    def logits(self, batch: PaddedBatch) -> Tensor:
        """Return the logits of the task, float32 [B, L] or [B, S, L]."""
        output = self.module(**model_inputs(batch, self.module.config))
        return self.task.logits(output, batch)[..., self._columns].float()

    def loss(self, batch: RowBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss, and the share of right choices."""
        return self.task.loss(self.logits(batch), batch.targets)

    def evaluate(self, _: int) -> Mapping[str, float]:
        """Return the figures of held-out rows; none without such rows."""
        return self.task.figures(self._held_out_logits()) if self.task.held_out_rows else {}

    def _held_out_logits(self) -> list[Floats]:
        rows, size = self.task.held_out_rows, self.task.settings.sequences
        return outputs_of(self.module, rows, self.logits, size=size, max_tokens=self._max_tokens)

    def calibrate(self) -> Calibration | None:
        """Divide the classifier by the temperature of held-out rows; None: nothing to measure."""
        if not self.task.held_out_rows:
            return None
        calibration = self.task.calibration(self._held_out_logits())
        if calibration is not None:
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


def model_inputs(batch: PaddedBatch, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Return the arguments of a model of transformers."""
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    if has_token_types(config):
        inputs["token_type_ids"] = batch.token_type_ids
    return inputs


_FIELDS = ("input_ids", "token_type_ids")


def outputs_of(
    network: torch.nn.Module,
    rows: Sequence[Any],
    compute: Callable[[PaddedBatch], Tensor],
    *,
    size: int,
    max_tokens: int,
) -> list[Floats]:
    """Return what a network in evaluation mode computes of rows, in order.

    The processes of a run share the batches, and each gets the results of all.

    Args:
        compute: batch -> [B, L], or [B, S, L] without the padding in the result.
        size: rows per batch.
        max_tokens: the longest sequence of the network.
    """
    order = np.argsort([len(row.input_ids) for row in rows], kind="stable")
    groups = [order[at : at + size] for at in range(0, len(order), size)]
    state, device = PartialState(), next(network.parameters()).device
    network.eval()
    results: dict[int, Floats] = {}
    with torch.inference_mode():
        for group in groups[state.process_index :: state.num_processes]:
            chosen = [rows[index] for index in group]
            length = padded_length(len(chosen[-1].input_ids), max_tokens)
            ids, types = ([getattr(row, name) for row in chosen] for name in _FIELDS)
            batch = PaddedBatch(*padded(ids, types, length)).to(device)
            for index, row, output in zip(group, chosen, compute(batch).cpu(), strict=True):
                array: Floats = output.float().numpy()
                results[int(index)] = array[: len(row.input_ids)] if array.ndim == 2 else array
    shared: Mapping[int, Floats] = dict(gather_object(list(results.items())))
    return [shared[index] for index in range(len(rows))]
