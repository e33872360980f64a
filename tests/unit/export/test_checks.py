"""Calibration and verification of graphs: their formulas, grids and refusals."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cloze.export import calibration, verify
from cloze.export.calibration import _random_tokens, _record_largest, input_scales
from cloze.export.errors import ExportError
from cloze.export.verify import TOLERANCES, _Case, _compare, _sizes
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Precision
from tests.unit.export.scorers import CLS, MASK, SEP, VOCABULARY

TOKENIZER: Any = SimpleNamespace(size=len(VOCABULARY), cls_id=CLS, sep_id=SEP, mask_id=MASK)


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


class _Model:
    """A model of one layer whose inputs are known: [2, 8] after the norm, [4, 1] after attention."""

    def __init__(self, layer: Any) -> None:
        self.encoder = SimpleNamespace(layers=[layer])
        self.config = SimpleNamespace(max_positions=16)
        self._layer = layer

    def __call__(self, ids: torch.Tensor) -> None:
        assert ids.shape == (32, 16)
        for linears, values in (
            ("query", [2.0, -8.0]),
            ("output", [-4.0, 1.0]),
            ("up", [1.0, 0.0]),
        ):
            for linear in self._layer.linears_by_input()[linears]:
                linear(torch.tensor([values]))


def test_smoothing_is_that_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(*weights: list[float]) -> nn.Linear:
        made = nn.Linear(2, len(weights), bias=False)
        made.weight = nn.Parameter(torch.tensor(weights))
        return made

    query = [linear([1.0, 0.5], [-3.0, 0.25]), linear([0.5, 4.0])]
    by_input = {"query": query, "output": [linear([7.0, 7.0])], "up": [linear([1.0, 0.0])]}

    class Layer:
        def linears_by_input(self) -> Any:
            return by_input

    monkeypatch.setattr(calibration, "Layer", Layer)
    model: Any = _Model(Layer())
    scales = input_scales(model, TOKENIZER)
    assert scales.keys() == {"layers.0.query", "layers.0.output", "layers.0.up"}
    # s_j = max |x_j|^0.75 / max |w_j|^0.25; the largest weights are 3 and 4.
    factors = [2**0.75 / 3**0.25, 8**0.75 / 4**0.25]
    smoothed = scales["layers.0.query"]
    assert smoothed.factors is not None
    assert smoothed.factors.tolist() == pytest.approx(factors, rel=1e-5)
    assert smoothed.step == pytest.approx(max(2 / factors[0], 8 / factors[1]) / 127, rel=1e-5)
    plain = scales["layers.0.output"]
    assert (plain.factors, plain.step) == (None, pytest.approx(4 / 127))
    least = scales["layers.0.up"].factors
    assert least is not None
    assert least[1].item() == pytest.approx(1e-5**0.75 / 1e-5**0.25, rel=1e-4)


# ---- verification ------------------------------------------------------------------------------


def test_tolerances_and_golden_files_of_the_precisions() -> None:
    assert {str(p): t for p, t in TOLERANCES.items()} == {"fp32": 1e-4, "int8": 0.25, "fp16": 0.03}
    assert {str(p): f for p, f in verify.GOLDEN_FILES.items()} == {
        "fp32": "golden.json", "int8": "golden-int8.json", "fp16": "golden-fp16.json",
    }  # fmt: skip


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
    case = _Case({"embeddings": np.zeros(2, np.float32)}, {"embeddings": np.zeros(2, np.float32)})
    worst: dict[str, float] = {}
    for off in (0.25, 0.5, 0.125):
        session: Any = _Session(off)
        _compare(session, case, "batch 1 x 3 tokens", 0.5, worst)
    assert worst == {"embeddings": 0.5}
    too_far: Any = _Session(0.75)
    with pytest.raises(
        ExportError, match=r"embeddings at batch 1 x 3 tokens differs from torch by 7.5"
    ):
        _compare(too_far, case, "batch 1 x 3 tokens", 0.5, worst)
    assert worst == {"embeddings": 0.75}


def test_the_grid_and_its_golden_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells: list[tuple[list[int], list[str]]] = []

    def make(_: Any, __: Any, sizes: Any, asked: Any) -> _Case:
        cells.append((sizes.tolist(), list(asked)))
        one = {"embeddings": np.full(1, len(sizes), np.float32)}
        return _Case(one, one)

    monkeypatch.setattr(verify, "_make_case", make)
    graph = SimpleNamespace(file="g.onnx", layout=Layout.DENSE, precision=Precision.FP32)
    heads = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    subject: Any = SimpleNamespace(graph=graph, heads=heads, max_tokens=20)
    session: Any = _Session(0.0)
    parity = verify.verify(tmp_path, subject, session)
    assert (parity.batches, parity.lengths) == ((1, 2, 8), (3, 16, 20))
    assert (parity.tolerance, parity.golden_file) == (1e-4, "golden.json")
    assert parity.max_error == {"embeddings": 0}
    grid = [([n] * b, ["a", "b"]) for b in (1, 2, 8) for n in (3, 16, 20)]
    assert cells == [*grid, ([16, 16], ["a"]), ([16, 16], ["b"]), ([16, 16], [])]
    golden = json.loads((tmp_path / "golden.json").read_text())
    assert golden == [{"feeds": {"embeddings": [2]}, "outputs": {"embeddings": [2]}}] * 2
    short: Any = SimpleNamespace(graph=graph, heads=heads, max_tokens=10)
    assert verify.verify(tmp_path, short, session).lengths == (3, 10)
    assert cells[-1][0] == [10, 10]
