"""Chooses which tokens are hidden from the model and what it sees in their place. Knows no text and no torch.

Sources: Devlin et al. 2019, section 3.1 (15 %, 80/10/10; whole words: the release notes of google-research/bert);
Joshi et al. 2020, "SpanBERT", section 3.1 (spans). Drawing anew at each epoch (Liu et al. 2019, "RoBERTa", section 4.1) or
always alike is the caller's, by the generator it passes.
"""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

_LONGEST_SPAN = 10
_SPAN_SHARES = 0.8 ** np.arange(_LONGEST_SPAN) / (0.8 ** np.arange(_LONGEST_SPAN)).sum()
"""Of spans of 1 to 10 words: geometric with p = 0.2, cut at 10 and scaled to 1; their mean is 3.8."""


class Unit(StrEnum):
    """What is hidden together."""

    TOKEN = "token"
    WHOLE_WORD = "whole-word"
    SPAN = "span"


@dataclass(frozen=True, slots=True)
class Masked:
    """One sequence with some of its tokens hidden.

    Attributes:
        input_ids: int64 [S], what the model sees.
        positions: int64 [M], ascending, where tokens were chosen.
        labels: int64 [M], what stood there.
        spans: int64 [M, 2], first and last position of the run of chosen tokens that each belongs to.
    """

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    labels: NDArray[np.int64]
    spans: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Masking:
    """Hides a share of a sequence's tokens.

    Attributes:
        unit: what is hidden together.
        rate: the share of a sequence's ordinary tokens that is chosen; a sequence with any has at least one chosen.
        mask_id: the id of ``[MASK]``.
        special: bool [V], tokens that are never chosen and never put in another's place.
        continues: bool [V], tokens that go on with the word before them.
        replace: the shares of chosen tokens that become ``[MASK]`` and that become a random token; the rest stays.
        final_rate: the rate at the end of a run, see `at`; None: as at its start.
    """

    unit: Unit
    rate: float
    mask_id: int
    special: NDArray[np.bool_]
    continues: NDArray[np.bool_]
    replace: tuple[float, float] = (0.8, 0.1)
    final_rate: float | None = None

    def at(self, progress: float) -> "Masking":
        """Return the masking at ``progress``, in [0, 1], of a run: the rate goes linearly to its final value.

        Source: Ankner et al. 2024, "Dynamic Masking Rate Schedules for MLM Pretraining", section 3.
        """
        if self.final_rate is None:
            return self
        rate = self.rate + (self.final_rate - self.rate) * progress
        return dataclasses.replace(self, rate=rate, final_rate=None)

    def __call__(self, input_ids: NDArray[np.int64], rng: np.random.Generator) -> Masked:
        """Hide tokens of ``input_ids`` int64 [S] (special tokens included, no padding)."""
        ordinary = ~self.special[input_ids]
        units = self._units(input_ids, ordinary)
        wanted = max(1, round(self.rate * ordinary.sum())) if len(units) else 0
        chosen = (
            self._choose_spans(units, wanted, rng)
            if self.unit is Unit.SPAN
            else self._choose(units, wanted, rng)
        )
        positions = np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, np.int64)
        seen = input_ids.copy()
        # A span is replaced as one; otherwise each token is drawn for itself.
        pieces = chosen if self.unit is Unit.SPAN else positions[:, None]
        draws = rng.random(len(pieces))
        random_ids = np.flatnonzero(~self.special)
        for piece, draw in zip(pieces, draws, strict=True):
            if draw < self.replace[0]:
                seen[piece] = self.mask_id
            elif draw < self.replace[0] + self.replace[1]:
                seen[piece] = rng.choice(random_ids, len(piece))
        return Masked(seen, positions, input_ids[positions], _runs(positions))

    def _units(
        self, input_ids: NDArray[np.int64], ordinary: NDArray[np.bool_]
    ) -> list[NDArray[np.int64]]:
        """The positions of each unit, in order: tokens, or whole words (a span is made of those)."""
        positions = np.flatnonzero(ordinary)
        if not len(positions):
            return []
        if self.unit is Unit.TOKEN:
            return list(positions[:, None])
        starts = ~self.continues[input_ids[positions]] | (np.diff(positions, prepend=-2) > 1)
        return np.split(positions, np.flatnonzero(starts[1:]) + 1)

    @staticmethod
    def _choose(
        units: list[NDArray[np.int64]], wanted: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        """Units in random order; one that would exceed the number wanted is passed over, unless it is the first."""
        chosen: list[NDArray[np.int64]] = []
        left = wanted
        for index in rng.permutation(len(units)):
            unit = units[index]
            if len(unit) <= left or not chosen:
                chosen.append(unit)
                left -= len(unit)
            if left <= 0:
                break
        return chosen

    @staticmethod
    def _choose_spans(
        units: list[NDArray[np.int64]], wanted: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        """Spans of 1 to 10 words, lengths geometric, until the number is reached; the last is cut to what is left of it."""
        taken = np.zeros(len(units), bool)
        chosen: list[NDArray[np.int64]] = []
        left = wanted
        for _ in range(10 * len(units)):
            if left <= 0:
                break
            length = min(1 + int(rng.choice(_LONGEST_SPAN, p=_SPAN_SHARES)), len(units))
            first = int(rng.integers(len(units) - length + 1))
            while length > 1 and sum(map(len, units[first : first + length])) > left:
                length -= 1
            positions = np.concatenate(units[first : first + length])
            # Neither over another span nor over a special token: the [SEP] between two texts is a boundary.
            if (
                taken[first : first + length].any()
                or positions[-1] - positions[0] != len(positions) - 1
                or len(positions) > left
            ):
                continue
            taken[first : first + length] = True
            chosen.append(positions)
            left -= len(positions)
        return chosen or [units[rng.integers(len(units))] for _ in range(min(wanted, 1))]


def _runs(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """[M] ascending -> [M, 2]: first and last position of the consecutive run that each is in."""
    if not len(positions):
        return np.zeros((0, 2), np.int64)
    run = np.cumsum(np.diff(positions, prepend=positions[0]) > 1)
    first = np.searchsorted(run, run, "left")
    last = np.searchsorted(run, run, "right") - 1
    return np.stack([positions[first], positions[last]], 1)
