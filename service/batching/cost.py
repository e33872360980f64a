"""What a batch costs, measured at start-up, and how many tokens a batch should therefore hold.

For engines that support variable-length batches.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model_store.batch import Encoding
from model_store.heads import Head
from service.core import MAX_BATCH_VOCABULARY_ROWS, MAX_PADDING_FACTOR, Engine, first_line

_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
_LENGTHS = (32, 128, 512)
_RUNS = 3

_OVERHEAD = 0.05
"""Largest useful share of a batch's time that its fixed part takes."""

_TYPICAL_LENGTH = 128

log = logging.getLogger("cloze")


@dataclass(frozen=True, slots=True)
class BatchCostModel:
    """Seconds per batch: ``fixed + per_token * tokens + per_square * sum(length ** 2)``.

    Attributes:
        fixed: seconds per batch.
        per_token: seconds per token.
        per_square: seconds per token and token of its sequence.
        max_tokens: tokens of the largest batch that ran.
    """

    fixed: float
    per_token: float
    per_square: float
    max_tokens: int = _TOKENS[-1]

    def __str__(self) -> str:
        return (
            f"one takes {self.fixed * 1e3:.2f} ms and {self.per_token * 1e9:.0f} ns per token, "
            f"{self.per_square * 1e9:.2f} ns more per token and token of its sequence; "
            f"up to {self.max_tokens} tokens ran"
        )

    def batch_tokens(self, objective_s: float) -> int:
        """Return how many tokens a batch should hold: from 512 to `max_tokens`.

        The batch is large enough for its fixed part to be a small share of its time, and small
        enough to run within the objective.

        Args:
            objective_s: longest run in seconds.
        """
        per_token = self.per_token + self.per_square * _TYPICAL_LENGTH
        if per_token <= 0:  # only the fixed part was measurable
            fits = self.fixed <= objective_s
            return self.max_tokens if fits else min(self.max_tokens, _TOKENS[0])
        worthwhile = self.fixed * (1 - _OVERHEAD) / _OVERHEAD / per_token
        allowed = (objective_s - self.fixed) / per_token
        return int(min(self.max_tokens, max(_TOKENS[0], min(worthwhile, allowed))))


def measure_cost(
    engine: Engine,
    heads: Sequence[Head],
    max_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> BatchCostModel:
    """Run batches of several sizes and lengths, and fit a cost model to their times.

    The largest batch runs first: the runtime then holds the memory that smaller batches need, and
    allocates none while serving.

    Args:
        engine: whose batches to measure; sizes that do not fit its memory are left out and logged.
        heads: of the engine's graph.
        max_tokens: the longest sequence that the engine takes.
        clock: returns seconds.

    Raises:
        Exception: whatever the engine raises on the smallest batch.
    """
    most = _largest_runnable(engine, heads, max_tokens)
    rows: list[tuple[float, int, int]] = []
    seconds: list[float] = []
    for length in sorted({min(length, max_tokens) for length in _LENGTHS}):
        for tokens in (tokens for tokens in _TOKENS if tokens <= most):
            batch = [_encoding(length, heads)] * (tokens // length)
            seconds.append(_fastest_run(engine, batch, clock))
            rows.append((1.0, len(batch) * length, len(batch) * length**2))
    fixed, per_token, per_square = _fit(np.array(rows, np.float64), np.array(seconds))
    return BatchCostModel(fixed, per_token, per_square, most)


def _largest_runnable(engine: Engine, heads: Sequence[Head], max_tokens: int) -> int:
    """Return the largest of `_TOKENS` for which the most memory-hungry batch runs."""
    for tokens in reversed(_TOKENS):
        try:
            engine.run(largest_batch(heads, max_tokens, tokens))
            return tokens
        except Exception as error:  # the runtime's errors have no common type
            if tokens == _TOKENS[0]:
                raise
            reason = first_line(error)
            log.warning("a batch of %d tokens does not run; trying half of it: %s", tokens, reason)
    raise AssertionError("there are sizes")


def largest_batch(heads: Sequence[Head], max_tokens: int, batch_tokens: int) -> list[Encoding]:
    """Return the batch of at most `batch_tokens` tokens that needs the most memory.

    One sequence has the longest length, which may exceed a batch, beside as many others as the
    padding factor allows: embeddings are gathered from sequences times the longest length, and
    each predicted mask has a logit per word of the vocabulary.

    Args:
        heads: of the engine's graph.
        max_tokens: the longest sequence.
        batch_tokens: most tokens of a batch.
    """
    rest = max(0, batch_tokens - max_tokens)
    others = min(rest, MAX_PADDING_FACTOR * batch_tokens // max_tokens - 1)
    length, longer = divmod(rest, others) if others > 0 else (0, 0)
    lengths = [length + 1] * longer + [length] * (others - longer)
    requests = {head.name: head.largest_request(MAX_BATCH_VOCABULARY_ROWS) for head in heads}
    longest = _encoding(max_tokens, ())
    longest.requests = requests
    return [longest, *(_encoding(length, heads) for length in lengths)]


def _encoding(length: int, heads: Sequence[Head]) -> Encoding:
    """Return an encoding that asks all heads but those that expand rows to the vocabulary."""
    requests = {head.name: head.largest_request(MAX_BATCH_VOCABULARY_ROWS) for head in heads}
    cheap = {name: request for name, request in requests.items() if not request.vocabulary_rows}
    return Encoding(np.zeros(length, np.int32), np.zeros(length, np.int32), cheap)


def _fastest_run(engine: Engine, batch: Sequence[Encoding], clock: Callable[[], float]) -> float:
    """Return the seconds of the fastest of some runs, after a warm-up run."""
    times = []
    for _ in range(_RUNS + 1):
        begin = clock()
        engine.run(batch)
        times.append(clock() - begin)
    return min(times[1:])


def _fit(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
    """Return the least-squares fit of relative errors, with no coefficient below zero."""
    used = list(range(rows.shape[1]))
    while True:
        weighted = rows[:, used] / seconds[:, None]
        scale = np.abs(weighted).max(0)
        fit = np.linalg.lstsq(weighted / scale, np.ones(len(seconds)), rcond=None)[0] / scale
        if (fit >= 0).all():
            return [float(fit[used.index(i)]) if i in used else 0.0 for i in range(rows.shape[1])]
        used.pop(int(np.argmin(fit * scale)))
