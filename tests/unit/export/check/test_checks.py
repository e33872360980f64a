"""Calibration and verification of graphs: their formulas, grids and refusals."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cloze.export.check.rounding import _random_tokens, _record_largest
from cloze.export.check.verify import TOLERANCES, _Case, _compare, _sizes
from cloze.export.errors import ExportError
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Precision
from cloze.model_store.sequences import SpecialTokens
from tests.unit.export.scorers import CLS, MASK, SEP, VOCABULARY

TOKENIZER: Any = SimpleNamespace(
    size=len(VOCABULARY), special=SpecialTokens(CLS, SEP, MASK), mask_id=MASK
)


# ---- calibration -------------------------------------------------------------------------------


def test_random_tokens_are_framed_and_masked_as_texts() -> None:
    ids = _random_tokens(TOKENIZER, 64, torch.Generator().manual_seed(0))
    assert ids.shape == (32, 64)
    assert set(ids[:, 0].tolist()) == {CLS}
    assert set(ids[:, -1].tolist()) == {SEP}
    assert 0.12 < (ids == MASK).float().mean() < 0.19
    assert int(ids.min()) >= 0
    assert len(VOCABULARY) - 5 < int(ids.max()) < len(VOCABULARY)
    without: Any = SimpleNamespace(**vars(TOKENIZER) | {"mask_id": None})
    assert (
        _random_tokens(without, 64, torch.Generator().manual_seed(0)) == MASK
    ).float().mean() < 0.03


def test_the_largest_inputs_of_all_passes_are_recorded() -> None:
    linear = nn.Linear(2, 1)
    largest: dict[str, torch.Tensor] = {}
    with _record_largest({"x": linear}, largest):
        linear(torch.tensor([[[1.0, -5.0], [-2.0, 3.0]]]))
        linear(torch.tensor([[[-3.0, 0.0]]]))
    assert largest["x"].tolist() == [3, 5]
    linear(torch.tensor([[9.0, 9.0]]))
    assert largest["x"].tolist() == [3, 5], "nothing is recorded afterwards"


# ---- verification ------------------------------------------------------------------------------


def test_tolerances_of_the_precisions() -> None:
    assert {str(p): t for p, t in TOLERANCES.items()} == {"fp32": 1e-4, "int8": 0.25, "fp16": 0.03}


def test_packed_sizes_are_mixed_up_to_the_longest() -> None:
    rng = np.random.default_rng(0)
    assert _sizes(rng, Layout.DENSE, 3, 7).tolist() == [7, 7, 7]
    drawn = np.array([_sizes(rng, Layout.PACKED, 8, 5) for _ in range(50)])
    assert set(drawn[:, 0]) == {5}
    assert set(drawn[:, 1:].ravel()) == {3, 4, 5}


class _Session:
    def __init__(self, off: float) -> None:
        self.off = off

    def run(self, names: list[str], feeds: dict[str, Any]) -> list[Any]:
        return [feeds[name] + self.off for name in names]


def test_the_largest_errors_are_kept_and_too_large_ones_refused() -> None:
    zeros = {"embeddings": np.zeros(2, np.float32)}
    case, cell = _Case([], zeros, zeros), "batch 1 x 3 tokens"
    subject: Any = SimpleNamespace(graph=SimpleNamespace(precision=Precision.INT8))
    worst: dict[str, float] = {}
    for off in (0.125, 0.25, 0.0625):
        session: Any = _Session(off)
        assert _compare(session, subject, case, cell, worst) == 0.25
    assert worst == {"embeddings": 0.25}
    too_far: Any = _Session(0.75)
    with pytest.raises(
        ExportError, match=r"embeddings at batch 1 x 3 tokens differs from torch by 7.5"
    ):
        _compare(too_far, subject, case, cell, worst)
