"""The cost model of variable-length batches, fitted at start-up to measured times.

The batch size limit in tokens follows from the model.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloze.model_store.batch import Encoding
from cloze.model_store.error_lines import first_line
from cloze.model_store.heads import Head
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import MAX_BATCH_VOCABULARY_ROWS, MAX_PADDING_FACTOR, Engine

_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
"""Batch sizes to measure, in tokens."""

_LENGTHS = (32, 128, 512)
"""Sequence lengths to measure, in tokens."""

_RUNS = 3
"""Measured runs per batch size and sequence length, after a warm-up run."""

_OVERHEAD = 0.05
"""Share of a batch's time below which a smaller fixed part brings no useful gain."""

_TYPICAL_LENGTH = 128
"""Sequence length, in tokens, for which the batch size limit is computed."""

log = logging.getLogger("cloze")


@dataclass(frozen=True, slots=True)
class BatchCostModel:
    """Seconds per batch: ``fixed + per_token * tokens + per_square * sum(length ** 2)``.

    `max_tokens` is the number of tokens of the largest batch that ran.
    """

    fixed: float
    per_token: float
    per_square: float
    max_tokens: int = _TOKENS[-1]

    def __str__(self) -> str:
        return (
            f"one takes {self.fixed * 1e3:.2f} ms and {self.per_token * 1e9:.0f} ns per token, "
            f"{self.per_square * 1e9:.2f} ns per pair of tokens of a sequence; "
            f"up to {self.max_tokens} tokens ran"
        )

    def batch_tokens(self, objective_s: float) -> int:
        """Return the batch size limit in tokens, between 512 and `max_tokens`.

        The limit is the smaller of two sizes: the size at which the fixed part is a small share of
        a batch's time, and the largest size that runs within the objective.
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
    clock: Clock = CLOCK,
) -> BatchCostModel:
    """Run batches of several sizes and lengths, and fit a cost model to their durations.

    The largest batch runs first. The runtime keeps the memory of that batch, and allocates no
    further memory while the service runs. Sizes that exceed the engine's memory are logged and
    skipped.

    Args:
        engine: the engine to measure.
        heads: the heads of the engine's graph.
        max_tokens: tokens of the longest sequence that the engine accepts.
        clock: tells the time.

    Raises:
        Exception: the engine raised on the smallest batch.
    """
    largest = _largest_runnable(engine, heads, max_tokens)
    rows: list[tuple[float, int, int]] = []
    seconds: list[float] = []
    for length in sorted({min(length, max_tokens) for length in _LENGTHS}):
        for tokens in (tokens for tokens in _TOKENS if tokens <= largest):
            batch, times = [_encoding(length, heads)] * (tokens // length), []
            for _ in range(1 + _RUNS):
                began = clock.monotonic()
                engine.run(batch)
                times.append(clock.monotonic() - began)
            seconds.append(min(times[1:]))
            rows.append((1.0, len(batch) * length, len(batch) * length**2))
    fixed, per_token, per_square = _fit(np.array(rows, np.float64), np.array(seconds))
    return BatchCostModel(fixed, per_token, per_square, largest)


def _largest_runnable(engine: Engine, heads: Sequence[Head], max_tokens: int) -> int:
    """Return the largest size of `_TOKENS` whose `largest_batch` fits in the engine's memory."""
    for tokens in reversed(_TOKENS):
        try:
            engine.run(largest_batch(heads, max_tokens, tokens))
            return tokens
        except Exception as error:  # the runtime's errors have no common type
            if tokens == _TOKENS[0]:
                raise
            reason = first_line(error)
            log.warning("a batch of %d tokens does not run; trying half of it: %s", tokens, reason)
    raise AssertionError("unreachable: the smallest size returns or raises")


def largest_batch(heads: Sequence[Head], max_tokens: int, batch_tokens: int) -> list[Encoding]:
    """Return the batch of at most `batch_tokens` tokens that needs the most memory.

    The batch has one sequence of `max_tokens`, which may exceed `batch_tokens`, and as many other
    sequences as the padding factor allows. The embedding head needs memory for the number of
    sequences times the greatest length. The masked-language-model head needs memory for one logit
    per word of the vocabulary and predicted mask.
    """
    rest = max(0, batch_tokens - max_tokens)
    others = min(rest, MAX_PADDING_FACTOR * batch_tokens // max_tokens - 1)
    length, longer = divmod(rest, others) if others > 0 else (0, 0)
    lengths = [length + 1] * longer + [length] * (others - longer)
    longest = _encoding(max_tokens, heads, MAX_BATCH_VOCABULARY_ROWS)
    return [longest, *(_encoding(length, heads) for length in lengths)]


def _encoding(length: int, heads: Sequence[Head], most_rows: int = 0) -> Encoding:
    """Return an encoding with requests of the heads that need no more rows of the vocabulary."""
    requests = {head.name: head.largest_request(MAX_BATCH_VOCABULARY_ROWS) for head in heads}
    kept = {name: each for name, each in requests.items() if each.vocabulary_rows <= most_rows}
    return Encoding(np.zeros(length, np.int32), np.zeros(length, np.int32), kept)


def _fit(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
    """Return the coefficients [K] that minimise squared relative errors; none is below zero.

    Args:
        rows: [N, K], the factors of the coefficients in each measurement.
        seconds: [N], the duration of each measurement.
    """
    used = list(range(rows.shape[1]))
    while True:
        weighted = rows[:, used] / seconds[:, None]
        scale = np.abs(weighted).max(0)
        fit = np.linalg.lstsq(weighted / scale, np.ones(len(seconds)), rcond=None)[0] / scale
        if (fit >= 0).all():
            return [float(fit[used.index(i)]) if i in used else 0.0 for i in range(rows.shape[1])]
        used.pop(int(np.argmin(fit * scale)))
