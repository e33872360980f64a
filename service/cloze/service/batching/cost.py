"""The cost model of variable-length batches, fitted at start-up to measured times.

The batch size limit in tokens follows from the model.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cloze.model_store.batch import Encoding
from cloze.model_store.error_lines import first_line
from cloze.model_store.heads import Head
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import MAX_BATCH_VOCABULARY_ROWS, MAX_PADDING_FACTOR, Engine

_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
"""Batch sizes to measure, in tokens."""

_LENGTH = 128
"""Length of the sequences to measure, in tokens; that of a typical text."""

_RUNS = 3
"""Measured runs per batch size, after a warm-up run."""

_OVERHEAD = 0.05
"""Share of a batch's time below which a smaller fixed part brings no useful gain."""

log = logging.getLogger("cloze")


@dataclass(frozen=True, slots=True)
class BatchCostModel:
    """Seconds per batch of sequences of a typical length: ``fixed + per_token * tokens``.

    `max_tokens` is the number of tokens of the largest batch that ran.
    """

    fixed: float
    per_token: float
    max_tokens: int = _TOKENS[-1]

    def __str__(self) -> str:
        return (
            f"one takes {self.fixed * 1e3:.2f} ms and {self.per_token * 1e9:.0f} ns per token; "
            f"up to {self.max_tokens} tokens ran"
        )

    def batch_tokens(self, objective_s: float) -> int:
        """Return the batch size limit in tokens, between 512 and `max_tokens`.

        The limit is the smaller of two sizes: the size at which the fixed part is a small share of
        a batch's time, and the largest size that runs within the objective.
        """
        if self.per_token <= 0:  # only the fixed part was measurable
            fits = self.fixed <= objective_s
            return self.max_tokens if fits else min(self.max_tokens, _TOKENS[0])
        worthwhile = self.fixed * (1 - _OVERHEAD) / _OVERHEAD / self.per_token
        allowed = (objective_s - self.fixed) / self.per_token
        return int(min(self.max_tokens, max(_TOKENS[0], min(worthwhile, allowed))))


def measure_cost(
    engine: Engine,
    heads: Sequence[Head],
    max_tokens: int,
    clock: Clock = CLOCK,
) -> BatchCostModel:
    """Run batches of several sizes, and fit a cost model to their durations.

    The largest batch runs first. The runtime keeps the memory of that batch, and allocates no
    further memory while the service runs. Sizes that exceed the engine's memory are logged and
    skipped.

    Args:
        engine: the engine to measure.
        heads: the heads of its graph.
        max_tokens: tokens of the longest sequence that the engine accepts.

    Raises:
        Exception: the engine raised on the smallest batch.
    """
    largest = _largest_runnable(engine, heads, max_tokens)
    length = min(_LENGTH, max_tokens)
    rows: list[tuple[float, float]] = []  # of relative errors: both terms per second
    for count in (tokens // length for tokens in _TOKENS if tokens <= largest):
        batch, times = [_encoding(length, heads)] * count, []
        for _ in range(1 + _RUNS):
            began = clock.monotonic()
            engine.run(batch)
            times.append(clock.monotonic() - began)
        seconds = min(times[1:])
        rows.append((1 / seconds, count * length / seconds))
    fixed, per_token = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0]
    return BatchCostModel(max(0.0, float(fixed)), float(per_token), largest)


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
