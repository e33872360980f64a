"""Costs of batches, fitted to measured times, with a clock by hand."""

from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads import HEADS
from cloze.service.batching.cost import (
    BatchCostModel,
    _fit,
    _largest_runnable,
    largest_batch,
    measure_cost,
)
from cloze.service.core import MAX_BATCH_VOCABULARY_ROWS, MAX_PADDING_FACTOR
from tests.virtual_time import VirtualClock


def test_the_limit_of_a_batch_makes_its_fixed_part_small() -> None:
    # 19 x 10 ms is the time in which 10 ms are a twentieth; a token takes 10 us + 128 x 0.01 us.
    model = BatchCostModel(0.01, 1e-5, 1e-8)
    assert model.batch_tokens(10.0) == 16384
    assert BatchCostModel(0.001, 1e-5, 1e-8).batch_tokens(10.0) == int(0.019 / 1.128e-5)
    assert BatchCostModel(0.01, 1e-5, 1e-8).batch_tokens(0.05) == int(0.04 / 1.128e-5)
    assert BatchCostModel(0.01, 1e-5, 1e-8).batch_tokens(0.011) == 512
    assert BatchCostModel(0.01, 1e-5, 1e-8, 1024).batch_tokens(10.0) == 1024
    assert BatchCostModel(0.01, 1e-5, 1e-8, 256).batch_tokens(0.011) == 256


def test_only_a_fixed_part() -> None:
    assert BatchCostModel(0.01, 0.0, 0.0).batch_tokens(0.01) == 16384
    assert BatchCostModel(0.01, 0.0, 0.0).batch_tokens(0.009) == 512
    assert BatchCostModel(0.01, 0.0, 0.0, 256).batch_tokens(0.009) == 256


def test_a_cost_model_shows_its_units() -> None:
    shown = str(BatchCostModel(0.0015, 2e-6, 3e-9, 512))
    assert shown.startswith("one takes 1.50 ms and 2000 ns per token, 3.00 ns per pair")
    assert shown.endswith("up to 512 tokens ran")


def test_a_fit_finds_the_coefficients_and_none_below_zero() -> None:
    rows = np.array([(1.0, t, t * n) for t in (512, 1024, 4096) for n in (32, 128)])
    assert _fit(rows, rows @ [0.002, 1e-5, 1e-8]) == pytest.approx([0.002, 1e-5, 1e-8], rel=1e-6)
    fixed, per_token, per_square = _fit(rows, rows @ [0.002, 1e-5, -1e-9])
    assert per_square == 0
    assert fixed > 0
    assert per_token > 0


@pytest.mark.parametrize(
    ("true", "noise", "fitted"),
    [
        (
            [0.004603013, 3.848e-06, 2.8e-07],
            [1.11, 0.7, 1.15, 1.03, 1.03, 0.87],
            [0.0041902288, 8.498041468e-06, 1.8819605674e-07],
        ),
        (
            [-0.001653088, 1.5136e-05, -3.5e-08],
            [1.11, 1.27, 1.07, 0.7, 0.96, 0.93],
            [8.40946677406744e-05, 9.106957005390182e-06, 0.0],
        ),
    ],
)
def test_a_fit_minimises_relative_errors(
    true: list[float], noise: list[float], fitted: list[float]
) -> None:
    """The second fit leaves out the coefficient that is the furthest below zero for its column."""
    rows = np.array([(1.0, t, t * n) for t in (512, 1024, 4096) for n in (32, 128)])
    assert _fit(rows, rows @ true * noise) == pytest.approx(fitted, rel=1e-6)


class Clocked(VirtualClock):
    """An engine, and its clock, whose batches take a known time, and that fails above a number of tokens."""

    def __init__(self, most: int = 10**9) -> None:
        super().__init__()
        self.most = most
        self.batches: list[list[int]] = []
        self.runs = 0

    def run(self, batch: Any) -> None:
        lengths = [len(encoding) for encoding in batch]
        if sum(lengths) > self.most:
            raise RuntimeError("no memory\nfor it")
        self.batches.append(lengths)
        self.runs += 1
        slow = 5.0 if self.runs % 4 == 2 else 0.0  # the warm-up, and noise that the fastest avoids
        self.now += 0.002 + 1e-5 * sum(lengths) + 1e-8 * sum(n * n for n in lengths) + slow


def test_costs_are_measured_by_the_fastest_run() -> None:
    engine: Any = Clocked()
    model = measure_cost(engine, [HEADS["embedding"]], 512, engine)
    assert (model.fixed, model.per_token, model.per_square) == pytest.approx(
        (0.002, 1e-5, 1e-8), rel=1e-3
    )
    assert model.max_tokens == 16384
    assert max(engine.batches[0]) == 512, "the largest batch runs first"
    assert {max(batch) for batch in engine.batches[1:]} == {32, 128, 512}
    assert len(engine.batches) == 1 + 3 * 6 * 4


def test_no_length_is_measured_beyond_the_model() -> None:
    engine: Any = Clocked(most=1100)
    model = measure_cost(engine, [HEADS["embedding"]], 100, engine)
    assert {max(batch) for batch in engine.batches[1:]} == {32, 100}
    assert {sum(batch) for batch in engine.batches[1:]} == {512, 1024, 500, 1000}
    assert model.max_tokens == 1024


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
