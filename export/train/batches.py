"""Turns drawn sequences into the tensors of a batch: joined, masked, padded to the phase's length."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from export.train.corpus import Corpus
from export.train.errors import TrainError
from export.train.masking import Masked, Masking
from export.train.pairs import Sequence, Sequences
from export.train.recipe import Phase, Pretraining
from export.train.vocabulary import SpecialIds

_POOL = 16
"""Batches whose examples are sorted by length together."""

_LENGTH_STEP = 16

_MANY = 1_000_000
"""More epochs than a phase has, so that no two phases draw alike."""


@dataclass(frozen=True, slots=True)
class TextBatch:
    """A batch of masked sequences. Positions count over the flattened [B * S].

    Attributes:
        input_ids: int64 [B, S], some tokens hidden.
        token_type_ids: int64 [B, S].
        attention_mask: bool [B, S], True for real tokens.
        positions: int64 [M], the chosen tokens.
        labels: int64 [M], what stands there.
        spans: int64 [M, 2], first and last chosen token of each one's run.
        next_labels: int64 [B]; empty without a sentence objective.
        first_positions: int64 [B], where each sequence begins; None: all at 0.
        tokens: real tokens.
    """

    input_ids: Tensor
    token_type_ids: Tensor
    attention_mask: Tensor
    positions: Tensor
    labels: Tensor
    spans: Tensor
    next_labels: Tensor
    first_positions: Tensor | None
    tokens: int

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def collate(
    rows: list[tuple[Sequence, Masked]], length: int, first_positions: list[int] | None = None
) -> TextBatch:
    """Pad rows with zeros to ``length``."""
    shape = (len(rows), length)
    input_ids, types, mask = (
        np.zeros(shape, np.int64),
        np.zeros(shape, np.int64),
        np.zeros(shape, bool),
    )
    for row, (sequence, masked) in enumerate(rows):
        size = len(masked.input_ids)
        input_ids[row, :size], types[row, :size], mask[row, :size] = (
            masked.input_ids,
            sequence.token_type_ids,
            True,
        )
    starts = np.arange(len(rows)) * length
    return TextBatch(
        input_ids=torch.from_numpy(input_ids),
        token_type_ids=torch.from_numpy(types),
        attention_mask=torch.from_numpy(mask),
        positions=torch.from_numpy(
            np.concatenate(
                [masked.positions + at for (_, masked), at in zip(rows, starts, strict=True)]
            )
        ),
        labels=torch.from_numpy(np.concatenate([masked.labels for _, masked in rows])),
        spans=torch.from_numpy(
            np.concatenate(
                [masked.spans + at for (_, masked), at in zip(rows, starts, strict=True)]
            )
        ),
        next_labels=torch.tensor(
            [sequence.label for sequence, _ in rows if sequence.label is not None],
            dtype=torch.int64,
        ),
        first_positions=None if first_positions is None else torch.tensor(first_positions),
        tokens=int(mask.sum()),
    )


def shuffled_batches(lengths: Sequence_[int], size: int, seed: int) -> Callable[[int], list[int]]:
    """Batches over examples, epoch by epoch: random, but rows of a batch have about one length, so little is padding.

    Args:
        lengths: tokens of each example.
        size: examples a batch; at the end of an epoch one is filled up from its start.
        seed: of the order.

    Returns:
        the examples of the ``number``-th batch, the same whenever it is asked for.
    """
    count = -(-len(lengths) // size)

    @lru_cache(maxsize=2)
    def epoch(number: int) -> NDArray[np.int64]:
        rng = np.random.default_rng([seed, number])
        order = np.resize(rng.permutation(len(lengths)), count * size)
        pools = np.array_split(order, max(1, count // _POOL))
        ordered = np.concatenate(
            [pool[np.argsort(np.asarray(lengths)[pool], kind="stable")] for pool in pools]
        )
        batches: NDArray[np.int64] = ordered.reshape(count, size)[rng.permutation(count)]
        return batches

    return lambda number: epoch(number // count)[number % count].tolist()


def padded_length(longest: int, limit: int) -> int:
    """The length to pad a batch to: few different ones, since the runtime makes and keeps kernels for each."""
    return min(-(-longest // _LENGTH_STEP) * _LENGTH_STEP, limit)


class TextBatches:
    """The batches of a run over a corpus: any of them can be asked for at any time, and is always the same.

    Args:
        corpus: the text.
        recipe: how it is masked and paired.
        phases: lengths and sizes, in their order.
        masking: hides tokens.
        special: of the vocabulary.
        seed: of everything drawn.
        accumulation: batches per step.
        weights: sampling weights of the corpus' sources, see `sampling_shares`.
    """

    def __init__(
        self,
        corpus: Corpus,
        recipe: Pretraining,
        phases: list[Phase],
        masking: Masking,
        *,
        special: SpecialIds,
        seed: int,
        accumulation: int = 1,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._corpus, self._recipe, self._phases, self._masking = corpus, recipe, phases, masking
        self._special, self._seed, self._accumulation, self._weights = (
            special,
            seed,
            accumulation,
            weights,
        )
        self._lengths: dict[tuple[int, int], int] = {}
        self._ends: list[list[int]] = [[] for _ in phases]
        self._kept: dict[tuple[int, int], Sequences] = {}
        self.steps = sum(phase.steps for phase in phases)
        self._row(0, 0, masking)  # what the corpus cannot give is said before a run begins

    def grows_from(self, step: int) -> int | None:
        """The longest sequence before ``step``, if a phase of longer ones begins with it."""
        first, longest = 0, 0
        for phase in self._phases:
            if step == first and phase.tokens > longest > 0:
                return longest
            first, longest = first + phase.steps, max(longest, phase.tokens)
        return None

    def phase(self, step: int) -> int:
        """The number of the phase that a step is in."""
        ends = np.cumsum([phase.steps for phase in self._phases])
        return int(np.searchsorted(ends, step, "right"))

    def __call__(self, step: int, part: int) -> TextBatch:
        """The ``part``-th batch of a step."""
        index = self.phase(step)
        phase, first = self._phases[index], sum(phase.steps for phase in self._phases[:index])
        number = ((step - first) * self._accumulation + part) * phase.sequences
        masking = self._masking.at(step / max(1, self.steps - 1))
        rows = [self._row(index, number + row, masking) for row in range(phase.sequences)]
        return collate(
            rows,
            phase.tokens,
            self._first_positions(index, number, len(rows)) if self._recipe.shifted else None,
        )

    def _first_positions(self, phase: int, number: int, count: int) -> list[int]:
        """Where the ``count`` sequences from ``number`` on begin: at 0, or so that the longest phase's positions are all seen."""
        free = max(phase.tokens for phase in self._phases) - self._phases[phase].tokens
        rng = np.random.default_rng([self._seed, phase, number, 1])
        moved: NDArray[np.int64] = rng.integers(0, free + 1, count) * (
            rng.random(count) < self._recipe.shifted
        )
        first_positions: list[int] = moved.tolist()
        return first_positions

    def _row(self, phase: int, number: int, masking: Masking) -> tuple[Sequence, Masked]:
        """The sequence of this number; of one with nothing but unknown words, which gives no loss, the next that has others."""
        for other in range(number, number + 2 * self.epoch_length(phase, 0)):
            sequence, masked = self._draw(phase, other, masking)
            if len(masked.positions):
                return sequence, masked
        raise TrainError("the vocabulary has no word of the text: there is nothing to mask")

    def _draw(self, phase: int, number: int, masking: Masking) -> tuple[Sequence, Masked]:
        ends = self._ends[
            phase
        ]  # after how many sequences each epoch ends: they differ a little in length
        while not ends or number >= ends[-1]:
            ends.append(sum(ends[-1:]) + self.epoch_length(phase, len(ends)))
        epoch = bisect_right(ends, number)
        number -= ends[epoch - 1] if epoch else 0
        sequences = self._sequences(phase, epoch)
        rng = sequences.rng(number)
        sequence = sequences.make(number, rng)
        return sequence, masking(sequence.input_ids, rng)

    def epoch_length(self, phase: int, epoch: int) -> int:
        """How many sequences a pass over the corpus has."""
        if (phase, epoch) not in self._lengths:
            self._lengths[phase, epoch] = len(self._sequences(phase, epoch))
        return self._lengths[phase, epoch]

    def _sequences(self, phase: int, epoch: int) -> Sequences:
        """Of one pass; the last two are kept, since a batch may straddle them."""
        if (phase, epoch) not in self._kept:
            while len(self._kept) > 1:
                del self._kept[next(iter(self._kept))]
            self._kept[phase, epoch] = Sequences(
                self._corpus,
                length=self._phases[phase].tokens,
                sentence=self._recipe.sentence,
                special=self._special,
                seed=self._seed,
                epoch=phase * _MANY + (epoch if self._recipe.dynamic else 0),
                short=self._recipe.short,
                weights=self._weights,
            )
        return self._kept[phase, epoch]
