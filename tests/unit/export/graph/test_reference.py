"""The reference of the fused operators: each operator alone against torch, in fp32 and fp16."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from cloze.export.graph.builder import FUSED, GraphBuilder
from cloze.export.graph.session import ReferenceSession
from cloze.model_store.batch import placement_of
from cloze.model_store.layouts import Layout

Array = Any
RNG = np.random.default_rng(0)


def run(
    folder: Path, kind: str, inputs: Sequence[Array | None], domain: str = FUSED, **attributes: Any
) -> Array:
    """Run one operator; None is an absent input."""
    g = GraphBuilder()
    names, feeds = [], {}
    for number, values in enumerate(inputs):
        if values is None:
            names.append("")
            continue
        dtype = helper.np_dtype_to_tensor_dtype(values.dtype)
        names.append(g.input(f"x{number}", dtype, list(values.shape)))
        feeds[f"x{number}"] = values
    result = g.op(kind, names, domain=domain, **attributes)
    g.output(result, "y", TensorProto.FLOAT, ["N", "H"])
    g.save(folder / "g.onnx", folder / "w.bin")
    [values] = ReferenceSession(folder / "g.onnx").run(["y"], feeds)
    return values


def drawn(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_is_within_each_sequence(dtype: Any, heads: int, tmp_path: Path) -> None:
    lengths = [3, 1, 5]
    query, key, value = (drawn(9, 8, dtype=dtype) for _ in range(3))
    feeds = placement_of(Layout.PACKED, lengths).feeds()
    places = [feeds["token_offset"], feeds["cu_seqlens"]]
    inputs = [query, key, value, None, *places]
    result = run(tmp_path, "PackedMultiHeadAttention", inputs, num_heads=heads)
    assert result.dtype == dtype
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        q, k, v = (
            torch.from_numpy(x[rows].astype(np.float32)).view(length, heads, -1).transpose(0, 1)
            for x in (query, key, value)
        )
        expected = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(length, 8)
        tolerance = 1e-6 if dtype is np.float32 else 2e-3
        np.testing.assert_allclose(result[rows], expected, atol=tolerance)
        start += length


def test_large_scores_do_not_overflow(tmp_path: Path) -> None:
    query = np.full((2, 8), 100, np.float32)
    feeds = placement_of(Layout.PACKED, [2]).feeds()
    inputs = [query, query, drawn(2, 8), None, feeds["token_offset"], feeds["cu_seqlens"]]
    result = run(tmp_path, "PackedMultiHeadAttention", inputs, num_heads=1)
    np.testing.assert_allclose(result[0], inputs[2].mean(0), atol=1e-6)
    inputs[1] = np.array([[100] * 8, [-100] * 8], np.float32)
    result = run(tmp_path, "PackedMultiHeadAttention", inputs, num_heads=1)
    np.testing.assert_allclose(result, inputs[2][[0, 0]], atol=1e-6)


def test_sums_of_norms_are_in_fp32(tmp_path: Path) -> None:
    """In fp16, 60000 + 60000 is infinite."""
    x = np.array([[60000, -60000, 1, 2]], np.float16)
    one, zero = np.ones(4, np.float16), np.zeros(4, np.float16)
    for inputs in ([x, x, one, zero], [x, x, one, zero, x[0]]):
        result = run(tmp_path, "SkipLayerNormalization", inputs, epsilon=1e-5)
        assert np.isfinite(result).all()


def test_products_of_fp16_are_sums_in_fp32(tmp_path: Path) -> None:
    a = np.full((1, 4096), 1.0, np.float16)
    b = np.full((4096, 1), 0.25, np.float16)
    a[0, 0] = 2048  # in fp16, 512 and many small numbers are 512
    result = run(tmp_path, "MatMul", [a, b], domain="")
    assert result.dtype == np.float16
    assert result.tolist() == [[np.float16(2048 * 0.25 + 4095 * 0.25)]]
    x, y = drawn(3, 5), drawn(5, 2)
    np.testing.assert_allclose(run(tmp_path, "MatMul", [x, y], domain=""), x @ y, rtol=1e-6)
