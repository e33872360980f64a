"""Measures how fast an engine runs batches on as many workers as a server has."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from cloze.model_store.batch import Encoding
from cloze.service.core import Engine


def rounds_per_s(play_round: Callable[[], object], seconds: float) -> float:
    """Return how many rounds run per second."""
    rounds, started = 0, time.perf_counter()
    while not rounds or time.perf_counter() - started < seconds:
        play_round()
        rounds += 1
    return rounds / (time.perf_counter() - started)


def run_all(engine: Engine, batches: Sequence[Sequence[Encoding]], workers: int) -> None:
    """Run every batch once on `workers` threads, the last batch first.

    Raises:
        Exception: the first exception of the engine.
    """
    with ThreadPoolExecutor(workers) as pool:
        deque(pool.map(engine.run, reversed(batches)), maxlen=0)


def cut_batches(encodings: Sequence[Encoding], batch_tokens: int) -> list[list[Encoding]]:
    """Cut the encodings, in their order, into batches of at most `batch_tokens` tokens.

    A longer encoding is a batch of its own.
    """
    batches: list[list[Encoding]] = []
    tokens = batch_tokens
    for encoding in encodings:
        if tokens + len(encoding) > batch_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(encoding)
        tokens += len(encoding)
    return batches


def batches_for(
    engine: Engine, encodings: Sequence[Encoding], batch_tokens: int
) -> list[list[Encoding]]:
    """Cut the encodings into batches that the engine supports.

    An engine with variable-length batches takes the encodings in their order. Another engine takes
    batches of one length each, in ascending order of length.
    """
    if engine.supports_varlen:
        return cut_batches(encodings, batch_tokens)
    groups: dict[int, list[Encoding]] = defaultdict(list)
    for encoding in encodings:
        groups[len(encoding)].append(encoding)
    return [
        batch for _, group in sorted(groups.items()) for batch in cut_batches(group, batch_tokens)
    ]
