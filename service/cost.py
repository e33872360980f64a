"""What a batch costs, measured at start-up, and how many tokens one should therefore hold. For engines that mix lengths."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.core import CELLS_A_TOKEN, Engine, Query

_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
_LENGTHS = (32, 128, 512)
_RUNS = 3

_OVERHEAD = 0.05
"""Share of a batch's time that its fixed part may take; beyond that a larger batch gains next to nothing."""

_TYPICAL_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a batch: ``fixed + per_token * tokens + per_square * (sum of squared lengths)``.

    Attributes:
        most: tokens of the largest batch that ran.
    """

    fixed: float
    per_token: float
    per_square: float
    most: int = _TOKENS[-1]

    def batch_tokens(self, objective_s: float) -> int:
        """As many as leave the fixed part a small share of the time and keep it within the objective, from 512 to `most`."""
        a_token = self.per_token + self.per_square * _TYPICAL_LENGTH
        if a_token <= 0:  # nothing but the fixed part could be seen
            return self.most if self.fixed <= objective_s else min(self.most, _TOKENS[0])
        worthwhile = self.fixed * (1 - _OVERHEAD) / _OVERHEAD / a_token
        allowed = (objective_s - self.fixed) / a_token
        return int(min(self.most, max(_TOKENS[0], min(worthwhile, allowed))))


def measure_cost(engine: Engine, max_tokens: int, clock: Callable[[], float] = time.perf_counter, *, embed: bool = False) -> Cost:
    """Run batches of several sizes and lengths, and fit their times.

    Args:
        engine: whose; sizes for which its memory is not enough are left out.
        max_tokens: the longest sequence it takes.
        clock: seconds.
        embed: ask for embeddings, as most requests of such a model do.

    Raises:
        Exception: whatever the engine raises on the smallest batch.
    """
    rows: list[tuple[float, int, int]] = []
    seconds: list[float] = []
    most = _TOKENS[-1]
    for length in sorted({min(length, max_tokens) for length in _LENGTHS}):
        for tokens in (tokens for tokens in _TOKENS if tokens <= most):
            batch = [_query(length, embed=embed)] * (tokens // length)
            try:
                seconds.append(_best(engine, batch, clock))
            except Exception:  # the runtime's errors have no common type; of a larger batch, it is its memory
                if not rows or tokens == _TOKENS[0]:
                    raise
                most = tokens // 2
                break
            rows.append((1.0, len(batch) * length, len(batch) * length**2))
    fixed, per_token, per_square = _fit(np.array(rows, np.float64), np.array(seconds))
    return Cost(fixed, per_token, per_square, most)


def warm_up(engine: Engine, max_tokens: int, batch_tokens: int, *, embed: bool = False) -> None:
    """Run the batch that takes most memory: one sequence of the longest, and as many others as the scheduler puts beside it.

    What smaller batches need is then there, in whole pieces, and none has to be got while serving.

    Raises:
        Exception: whatever the engine raises; where it has run smaller batches, its memory is not enough.
    """
    longest = min(max_tokens, batch_tokens)
    others = max(0, min(batch_tokens - longest, CELLS_A_TOKEN * batch_tokens // longest - 1))
    lengths = [longest] + [len(part) for part in np.array_split(np.arange(batch_tokens - longest), others or 1) if len(part)]
    engine.run([_query(length, embed=embed) for length in lengths])


def _query(length: int, *, embed: bool) -> Query:
    return Query(np.zeros(length, np.int32), np.zeros(length, np.int32), embed=embed)


def _best(engine: Engine, batch: Sequence[Query], clock: Callable[[], float]) -> float:
    """Seconds of the quickest of some runs, after one that does not count."""
    times = []
    for _ in range(_RUNS + 1):
        begin = clock()
        engine.run(batch)
        times.append(clock() - begin)
    return min(times[1:])


def _fit(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
    """Least squares of relative errors, no coefficient below zero."""
    used = list(range(rows.shape[1]))
    while True:
        weighted = rows[:, used] / seconds[:, None]
        scale = np.abs(weighted).max(0)
        found = np.linalg.lstsq(weighted / scale, np.ones(len(seconds)), rcond=None)[0] / scale
        if (found >= 0).all():
            return [float(found[used.index(i)]) if i in used else 0.0 for i in range(rows.shape[1])]
        used.pop(int(np.argmin(found * scale)))
