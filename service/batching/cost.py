"""Measures the most tokens per batch of an engine with variable-length batches, at start-up."""

import logging
from collections.abc import Sequence

import numpy as np

from cloze.model_store.batch import Encoding
from cloze.model_store.error_lines import first_line
from cloze.model_store.heads import Head
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import MAX_BATCH_VOCABULARY_ROWS, MAX_PADDING_FACTOR, Engine

_TOKENS = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
"""Batch sizes to measure, in tokens."""

log = logging.getLogger("cloze")


def measure_batch_tokens(
    engine: Engine,
    heads: Sequence[Head],
    max_tokens: int,
    objective_s: float,
    clock: Clock = CLOCK,
) -> int:
    """Return the least size whose batches run at nearly the best rate of those within an objective.

    The largest batch runs first. The runtime keeps the memory of that batch, and allocates no
    further memory while the service runs. Sizes that exceed the engine's memory are logged and
    skipped.

    Args:
        engine: the engine to measure.
        heads: the heads of its graph.
        max_tokens: tokens of the longest sequence that the engine accepts.
        objective_s: longest duration of a batch; the smallest size may take longer.

    Raises:
        Exception: the engine raised on the smallest batch.
    """
    largest = _largest_runnable(engine, heads, max_tokens)
    length = min(128, max_tokens)  # that of a typical text
    rates: dict[int, float] = {}  # tokens per second by size
    for size in (size for size in _TOKENS if size <= largest):
        batch, times = [_encoding(length, heads)] * (size // length), []
        for _ in range(4):  # the first one warms up
            began = clock.monotonic()
            engine.run(batch)
            times.append(clock.monotonic() - began)
        seconds = min(times[1:])
        if seconds <= objective_s or not rates:
            rates[size] = len(batch) * length / seconds
    useful = 0.95 * max(rates.values())  # larger batches bring no useful gain
    limit = min(size for size, rate in rates.items() if rate >= useful)
    log.info("batches of %d tokens run at %.0f tokens per second", limit, rates[limit])
    return limit


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
            log.warning("a batch of %d tokens does not run; trying less: %s", tokens, reason)
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
