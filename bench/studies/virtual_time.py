"""Workers whose runs take as long as a cost model says, in virtual time.

Runs share the cores, as threads do: each of three runs on two cores gets two thirds of a core. No
run needs the processor, so that the figures of a study are the same on every machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cloze.service.batching.cost import BatchCostModel

CORES = 2

COSTS = {
    "fp32": BatchCostModel(2.9e-3, 0.185e-3, 80e-9),
    "int8": BatchCostModel(1.2e-3, 0.096e-3, 80e-9),
}
"""all-MiniLM-L6-v2 on one core of a Xeon at 2.8 GHz; bench/results/lone-batch-cpu.md."""

ALONE = {"fp32": 0.65, "int8": 0.9}
"""Duration of a run on both cores, over that on one core."""


class HasTokens(Protocol):
    """What waits: an encoding, of which the simulation needs the length."""

    @property
    def tokens(self) -> int:
        """Length of the encoding."""
        ...


Item = TypeVar("Item", bound=HasTokens)


class BatchQueue(Protocol[Item]):
    """A queue from which free workers take batches."""

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens of a batch; a longer encoding runs alone."""
        ...

    def __bool__(self) -> bool:
        """Return whether encodings wait."""
        ...

    def has_up_to(self, length: int) -> bool:
        """Return whether an encoding of at most so many tokens waits."""
        ...

    def take_batch(self, *, takers: int = 1, longest: int | None = None) -> list[Item]:
        """Remove a batch of one length; it is empty if all of it was dropped.

        Args:
            takers: number of workers that could take a batch now.
            longest: most tokens of an encoding to consider; None: of any length.
        """
        ...


@dataclass(slots=True)
class Run(Generic[Item]):
    """A batch that runs.

    Attributes:
        left_s: the seconds that are left on a core of its own.
        batch: what runs.
        tokens: length of the first encoding of the batch.
        is_extra: whether the worker for short texts runs the batch.
    """

    left_s: float
    batch: list[Item]
    tokens: int
    is_extra: bool


class Workers(Generic[Item]):
    """As many workers as cores, and one more for short texts.

    Args:
        cost: duration of a run.
        alone: factor of the duration of a run that has both cores.
        short_worker: whether a worker for short texts runs while all others run long ones.

    Attributes:
        runs: the batches that run now.
    """

    def __init__(self, cost: BatchCostModel, alone: float, *, short_worker: bool) -> None:
        self._cost, self._alone, self._short_worker = cost, alone, short_worker
        self.runs: list[Run[Item]] = []

    @property
    def idle(self) -> int:
        """Number of workers without a run, except the worker for short texts."""
        return CORES - sum(not run.is_extra for run in self.runs)

    def _is_short_worker_due(self, longest: int) -> bool:
        """Return whether the worker for short texts may begin a run.

        Args:
            longest: most tokens of a batch; a longer text runs alone.
        """
        busy = [run for run in self.runs if not run.is_extra]
        if not self._short_worker or len(busy) < CORES or len(self.runs) > len(busy):
            return False
        return min(run.tokens for run in busy) > longest

    def begin_run(self, queue: BatchQueue[Item]) -> bool:
        """Begin the run of a free worker; return whether there may be another one."""
        if not queue:
            return False
        if idle := self.idle:
            batch = queue.take_batch(takers=idle)
            self._begin(batch, alone=not self.runs and not queue)
            return True
        longest = queue.max_batch_tokens
        if not self._is_short_worker_due(longest) or not queue.has_up_to(longest):
            return False
        self._begin(queue.take_batch(longest=longest), is_extra=True)
        return True

    def _begin(self, batch: list[Item], *, alone: bool = False, is_extra: bool = False) -> None:
        if batch:
            lengths = [item.tokens for item in batch]
            seconds = self._seconds(lengths) * (self._alone if alone else 1)
            self.runs.append(Run(seconds, batch, lengths[0], is_extra))

    def _seconds(self, lengths: Sequence[int]) -> float:
        cost = self._cost
        squares = sum(n * n for n in lengths)
        return cost.fixed + cost.per_token * sum(lengths) + cost.per_square * squares

    def next_end_s(self) -> float:
        """Return the seconds until the next run ends if no other begins; infinity without runs."""
        left_s = min((run.left_s for run in self.runs), default=math.inf)
        return left_s / self._speed

    @property
    def _speed(self) -> float:
        return min(1.0, CORES / max(1, len(self.runs)))

    def advance(self, seconds: float) -> None:
        """Let all runs go on for so many seconds."""
        speed = self._speed
        for run in self.runs:
            run.left_s -= seconds * speed

    def end_first(self) -> Run[Item]:
        """Remove the run that ends next, and return it."""
        first = min(self.runs, key=lambda run: run.left_s)
        self.runs.remove(first)
        return first
