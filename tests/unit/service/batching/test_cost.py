"""Costs of batches, fitted to measured times, with a clock by hand."""

from typing import Any

import pytest

from cloze.model_store.heads import HEADS
from cloze.service.batching.cost import (
    _largest_runnable,
    largest_batch,
    measure_batch_tokens,
)
from cloze.service.core import MAX_BATCH_VOCABULARY_ROWS, MAX_PADDING_FACTOR
from tests.virtual_time import VirtualClock


class Clocked(VirtualClock):
    """An engine, and its clock, whose batches take a known time, and that fails above a number of tokens."""

    def __init__(self, most: int = 10**9, fixed: float = 0.002) -> None:
        super().__init__()
        self.most, self.fixed = most, fixed
        self.batches: list[list[int]] = []
        self.runs = 0

    def run(self, batch: Any) -> None:
        lengths = [len(encoding) for encoding in batch]
        if sum(lengths) > self.most:
            raise RuntimeError("no memory\nfor it")
        self.batches.append(lengths)
        self.runs += 1
        slow = 5.0 if self.runs % 4 == 2 else 0.0  # the warm-up, and noise that the fastest avoids
        self.now += self.fixed + 1e-5 * sum(lengths) + 1e-8 * sum(n * n for n in lengths) + slow


def test_a_size_is_measured_by_its_fastest_run() -> None:
    engine: Any = Clocked()
    assert measure_batch_tokens(engine, [HEADS["embedding"]], 512, 0.1, engine) == 3072
    assert max(engine.batches[0]) == 512, "the largest batch runs first"
    assert {max(batch) for batch in engine.batches[1:]} == {128}
    assert len(engine.batches) == 1 + 11 * 4


def test_no_length_is_measured_beyond_the_model() -> None:
    engine: Any = Clocked(most=1100)
    assert measure_batch_tokens(engine, [HEADS["embedding"]], 100, 1.0, engine) == 1024
    assert {max(batch) for batch in engine.batches[1:]} == {100}
    assert {sum(batch) for batch in engine.batches[1:]} == {500, 700, 1000}


def test_a_size_that_does_not_run_is_halved(caplog: pytest.LogCaptureFixture) -> None:
    engine: Any = Clocked(most=3000)
    assert _largest_runnable(engine, [HEADS["embedding"]], 128) == 2048
    assert "a batch of 3072 tokens does not run; trying less: no memory" in caplog.text
    assert "for it" not in caplog.text
    nothing: Any = Clocked(most=10)
    with pytest.raises(RuntimeError, match="no memory"):
        _largest_runnable(nothing, [HEADS["embedding"]], 128)


def test_the_largest_batch_has_all_that_needs_memory() -> None:
    heads = [HEADS["embedding"], HEADS["masked_lm"]]
    batch = largest_batch(heads, 128, 2048)
    lengths = [len(encoding) for encoding in batch]
    assert lengths[0] == 128
    assert sum(lengths) == 2048
    assert len(batch) == MAX_PADDING_FACTOR * 2048 // 128
    assert max(lengths[1:]) - min(lengths[1:]) <= 1
    assert batch[0].vocabulary_rows == MAX_BATCH_VOCABULARY_ROWS
    assert all(encoding.vocabulary_rows == 0 for encoding in batch[1:])
    assert all(list(encoding.requests) == ["embedding"] for encoding in batch[1:])
    assert [len(e) for e in largest_batch(heads, 4096, 2048)] == [4096]
