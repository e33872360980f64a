"""Costs of batches, fitted to measured times, with a clock by hand."""

from typing import Any

import pytest

from cloze.model_store.heads import HEADS
from cloze.service.batching.cost import (
    BatchCostModel,
    _largest_runnable,
    largest_batch,
    measure_cost,
)
from cloze.service.core import MAX_BATCH_VOCABULARY_ROWS, MAX_PADDING_FACTOR
from tests.support.virtual_time import VirtualClock


def test_the_limit_of_a_batch_makes_its_fixed_part_small() -> None:
    # 19 x 10 ms is the time in which 10 ms are a twentieth.
    model = BatchCostModel(0.01, 1e-5)
    assert model.batch_tokens(10.0) == 16384
    assert BatchCostModel(0.001, 1e-5).batch_tokens(10.0) == int(0.019 / 1e-5)
    assert BatchCostModel(0.01, 1e-5).batch_tokens(0.05) == int(0.04 / 1e-5)
    assert BatchCostModel(0.01, 1e-5).batch_tokens(0.011) == 512
    assert BatchCostModel(0.01, 1e-5, 1024).batch_tokens(10.0) == 1024
    assert BatchCostModel(0.01, 1e-5, 256).batch_tokens(0.011) == 256


class Clocked(VirtualClock):
    """An engine, and its clock: batches take a known time, and too many tokens fail."""

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


def test_costs_are_measured_by_the_fastest_run() -> None:
    engine: Any = Clocked()
    model = measure_cost(engine, [HEADS["embedding"]], 512, engine)
    assert (model.fixed, model.per_token) == pytest.approx((0.002, 1e-5 + 128 * 1e-8))
    assert model.max_tokens == 16384
    assert max(engine.batches[0]) == 512, "the largest batch runs first"
    assert {max(batch) for batch in engine.batches[1:]} == {128}
    assert len(engine.batches) == 1 + 6 * 4
    engine = Clocked(fixed=-0.001)
    assert measure_cost(engine, [HEADS["embedding"]], 512, engine).fixed == 0.0


def test_a_size_that_does_not_run_is_halved(caplog: pytest.LogCaptureFixture) -> None:
    engine: Any = Clocked(most=3000)
    assert _largest_runnable(engine, [HEADS["embedding"]], 128) == 2048
    assert "a batch of 4096 tokens does not run; trying half of it: no memory" in caplog.text
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
