"""What a batch costs, measured at start-up, and how many tokens one should therefore hold. For engines that mix lengths."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.core import CELLS_A_TOKEN, MAX_BATCH_MASKS, Engine, Query, first_line

_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
_LENGTHS = (32, 128, 512)
_RUNS = 3

_OVERHEAD = 0.05
"""Share of a batch's time that its fixed part may take; beyond that a larger batch gains next to nothing."""

_TYPICAL_LENGTH = 128

_TOP_K = 5
"""Of the masks of the largest batch."""

log = logging.getLogger("cloze")


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

    def __str__(self) -> str:
        return (
            f"one takes {self.fixed * 1e3:.2f} ms and {self.per_token * 1e9:.0f} ns a token, "
            f"{self.per_square * 1e9:.2f} ns more a token and token of its length; up to {self.most} tokens ran"
        )

    def batch_tokens(self, objective_s: float) -> int:
        """As many as leave the fixed part a small share of the time and keep it within the objective, from 512 to `most`."""
        a_token = self.per_token + self.per_square * _TYPICAL_LENGTH
        if a_token <= 0:  # nothing but the fixed part could be seen
            return self.most if self.fixed <= objective_s else min(self.most, _TOKENS[0])
        worthwhile = self.fixed * (1 - _OVERHEAD) / _OVERHEAD / a_token
        allowed = (objective_s - self.fixed) / a_token
        return int(min(self.most, max(_TOKENS[0], min(worthwhile, allowed))))


def measure_cost(
    engine: Engine, max_tokens: int, clock: Callable[[], float] = time.perf_counter, *, embed: bool = False, masks: bool = False
) -> Cost:
    """Run batches of several sizes and lengths, and fit their times.

    The largest runs first: what smaller ones need is then there, in whole pieces, and none has to be got while serving.

    Args:
        engine: whose; sizes for which its memory is not enough are left out, and told.
        max_tokens: the longest sequence it takes.
        clock: seconds.
        embed: ask for embeddings, as most requests of such a model do.
        masks: whether it has the head for them; the largest batch asks for as many as one may.

    Raises:
        Exception: whatever the engine raises on the smallest batch.
    """
    most = _most(engine, max_tokens, embed=embed, masks=masks)
    rows: list[tuple[float, int, int]] = []
    seconds: list[float] = []
    for length in sorted({min(length, max_tokens) for length in _LENGTHS}):
        for tokens in (tokens for tokens in _TOKENS if tokens <= most):
            batch = [_query(length, embed=embed)] * (tokens // length)
            seconds.append(_best(engine, batch, clock))
            rows.append((1.0, len(batch) * length, len(batch) * length**2))
    fixed, per_token, per_square = _fit(np.array(rows, np.float64), np.array(seconds))
    return Cost(fixed, per_token, per_square, most)


def _most(engine: Engine, max_tokens: int, *, embed: bool, masks: bool) -> int:
    """Of `_TOKENS`, the most with which the largest batch runs."""
    for tokens in reversed(_TOKENS):
        try:
            engine.run(largest_batch(max_tokens, tokens, embed=embed, masks=masks))
            return tokens
        except Exception as error:  # the runtime's errors have no common type; of a larger batch, it is its memory
            if tokens == _TOKENS[0]:
                raise
            log.warning("a batch of %d tokens does not run, half of them are tried: %s", tokens, first_line(error))
    raise AssertionError("there are sizes")


def largest_batch(max_tokens: int, batch_tokens: int, *, embed: bool, masks: bool) -> list[Query]:
    """Of those that a scheduler may make with so many tokens, about that which takes most memory.

    One sequence of the longest, which may be longer than a batch, beside as many others as may be: embeddings are gathered from
    sequences times the longest, and each mask has a logit for every word.

    Args:
        max_tokens: the longest sequence.
        batch_tokens: of a batch.
        embed: whether all ask for their embeddings.
        masks: whether the longest asks for as many masks as a batch may hold.
    """
    rest = max(0, batch_tokens - max_tokens)
    others = min(rest, CELLS_A_TOKEN * batch_tokens // max_tokens - 1)
    length, longer = divmod(rest, others) if others > 0 else (0, 0)
    lengths = [length + 1] * longer + [length] * (others - longer)
    longest = _query(max_tokens, embed=embed)
    if masks:
        longest.masks, longest.top_k = [0] * MAX_BATCH_MASKS, _TOP_K
    return [longest, *(_query(length, embed=embed) for length in lengths)]


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
