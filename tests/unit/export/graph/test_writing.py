"""Constants, files and integers of a graph, without running one."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from cloze.export.errors import ExportError
from cloze.export.graph.builder import OPSET, GraphBuilder
from cloze.export.graph.linear_ops import to_fp16


def test_numbers_that_fp16_cannot_hold_are_refused() -> None:
    assert to_fp16("x", torch.tensor([65504.0])).tolist() == [65504]
    with pytest.raises(ExportError, match=r"x holds 6.56e\+04, which fp16 cannot; use fp32"):
        to_fp16("x", torch.tensor([1.0, -65600.0]))


def saved(
    g: GraphBuilder, folder: Path, shared: dict | None = None, name: str = "g"
) -> tuple[onnx.ModelProto, dict]:
    g.op("Abs", [next(iter(g._named))])
    g.output("Abs_0", "y", TensorProto.FLOAT, ["N"])
    stored = g.save(folder / f"{name}.onnx", folder / f"{name}.bin", shared)
    return onnx.load_model(folder / f"{name}.onnx", load_external_data=False), stored


def test_large_weights_lie_in_pages_of_their_file(tmp_path: Path) -> None:
    g = GraphBuilder()
    values = {
        "small": np.arange(255, dtype=np.float32),  # 1020 bytes
        "large": np.arange(256, dtype=np.float32),  # 1024 bytes
        "next": np.arange(300, dtype=np.float32),
    }
    for name, array in values.items():
        assert g.weight(name, array) == name
    model, stored = saved(g, tmp_path)
    assert stored.keys() == {"large", "next"}
    data = (tmp_path / "g.bin").read_bytes()
    assert data[:1024] == values["large"].tobytes()
    assert data[4096:] == values["next"].tobytes()
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    assert weights["small"].raw_data == values["small"].tobytes()
    place = {entry.key: entry.value for entry in weights["next"].external_data}
    assert place == {"location": "g.bin", "offset": "4096", "length": "1200"}
    # Weights whose bytes are no multiple of 64 are last.
    assert [tensor.name for tensor in model.graph.initializer] == ["large", "small", "next"]
    assert {o.domain: o.version for o in model.opset_import} == {"": OPSET, "com.microsoft": 1}
    assert (OPSET, model.ir_version, model.producer_name) == (20, 10, "cloze")


def test_only_a_graph_with_a_newer_operator_needs_a_newer_runtime(tmp_path: Path) -> None:
    g = GraphBuilder()
    assert g.opset == OPSET
    attended = g.op("Attention", ["x", "x", "x"], q_num_heads=1, kv_num_heads=1)
    g.output(attended, "y", TensorProto.FLOAT, ["B", "S", 8])
    g.save(tmp_path / "g.onnx", tmp_path / "g.bin")
    model = onnx.load_model(tmp_path / "g.onnx")
    assert {o.domain: o.version for o in model.opset_import} == {"": 23, "com.microsoft": 1}
    assert (g.opset, model.ir_version) == (23, 11)


def test_a_step_per_block_needs_a_newer_runtime() -> None:
    g = GraphBuilder()
    g.op("QuantizeLinear", ["x", "step", "zero"])
    assert g.opset == OPSET
    g.op("QuantizeLinear", ["x", "steps", "zeros"], axis=-1, block_size=8)
    assert g.opset == 21


def test_weights_of_another_graph_are_shared(tmp_path: Path) -> None:
    one, two = GraphBuilder(), GraphBuilder()
    for g in (one, two):
        g.weight("large", np.arange(256, dtype=np.float32))
    _, stored = saved(one, tmp_path)
    model, again = saved(two, tmp_path, stored, "other")
    assert again == stored
    assert not (tmp_path / "other.bin").exists()
    assert model.graph.initializer[0].external_data[0].value == "g.bin"
    other = GraphBuilder()
    other.weight("large", np.arange(1, 257, dtype=np.float32))
    with pytest.raises(AssertionError, match=r"large is another weight in g.bin"):
        saved(other, tmp_path, stored, "third")
