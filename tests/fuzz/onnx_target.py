"""ONNX files: a graph that protobuf's own reader sees as well, or a `ValueError`.

The service reads ONNX files with a reader of its own (`model_store/protobuf.py`). If that reader
accepts bytes, the runtime must see the same operators, tensors and weights in them.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st
from onnx import TensorProto, helper

from cloze.model_store.error_lines import printable
from cloze.model_store.onnx_file import DeclaredTensor, OnnxGraph, parse_onnx
from tests.fuzz.damage import damaged_bytes, damaged_json
from tests.fuzz.search import Target

MAX_LINE = 600
EXTERNAL = TensorProto.EXTERNAL
REFUSED = ("g", "graphs", "t", "tensors", "sparse_tensor", "sparse_tensors")
"""Fields of an attribute that no bundle has."""


def small_model() -> onnx.ModelProto:
    """Return a model with every kind of part that a bundle's graph has."""
    inside = TensorProto(name="w", dims=[1, 2], data_type=TensorProto.FLOAT, raw_data=b"\0" * 8)
    outside = TensorProto(name="v", dims=[2], data_type=TensorProto.FLOAT16, data_location=EXTERNAL)
    for key, value in (("location", "weights.bin"), ("offset", "4096"), ("length", "4")):
        outside.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w"], ["y"], transB=1, alpha=1.5, axes=[1, -1], mode="m")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 1])],
        [inside, outside],
    )
    return helper.make_model(graph, ir_version=10)


def tree_of(message: Message) -> list[Any]:
    """Return a message as a list of [number of a field, value]; a value may be such a list."""
    return [
        [field.number, tree_of(each) if isinstance(each, Message) else each]
        for field, value in message.ListFields()
        for each in (value if field.is_repeated else [value])
    ]


def varint(value: int) -> bytes:
    """Return an integer in the wire format; one above 2**64 takes more bytes than are allowed."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def write(tree: Any) -> bytes:
    """Return a tree in the wire format; whatever is no field is left out."""
    data = b""
    for entry in tree if isinstance(tree, list) else []:
        if not (isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is int):
            continue
        number, value = abs(entry[0]) % 2**40, entry[1]
        if isinstance(value, int):
            data += varint(number << 3) + varint(value if value >= 0 else value % 2**64)
        elif isinstance(value, float):
            data += varint(number << 3 | 5) + struct.pack("<f", 1.5)
        else:
            content = value.encode(errors="replace") if isinstance(value, str) else value
            content = content if isinstance(content, bytes) else write(content)
            data += varint(number << 3 | 2) + varint(len(content)) + content
    return data


TREE = tree_of(small_model())


@st.composite
def damaged_trees(draw: st.DrawFn) -> bytes:
    """Draw the small model with up to three fields removed, changed, moved or repeated."""
    tree = TREE
    for _ in range(draw(st.integers(0, 3))):
        tree = draw(damaged_json(tree))
    return write(tree)


def check(data: bytes, _: Path) -> bool:
    """Parse an ONNX file; return whether the service accepts the file."""
    try:
        ours = parse_onnx(data)
    except ValueError as error:
        line = printable(str(error))
        assert line.isprintable(), line
        assert len(line) < MAX_LINE, line
        return False
    try:
        theirs = onnx.ModelProto.FromString(data)
    except DecodeError:  # the runtime refuses the file as well
        return False
    check_same(ours, theirs)
    return True


def check_same(ours: OnnxGraph, model: onnx.ModelProto) -> None:
    """Check that protobuf's reader sees the graph that ours sees, and nothing that is refused."""
    graph = model.graph
    assert not model.functions
    assert not model.training_info
    assert not graph.sparse_initializer
    assert ours.operators == {(node.domain, node.op_type) for node in graph.node}
    for node in graph.node:
        for attribute in node.attribute:
            assert not set(REFUSED) & {field.name for field, _ in attribute.ListFields()}
    for mine, theirs in ((ours.inputs, graph.input), (ours.outputs, graph.output)):
        assert list(mine.items()) == [(info.name, declared(info)) for info in theirs]
    assert list(ours.weights) == [weight.name for weight in graph.initializer]
    for weight in graph.initializer:
        mine = ours.weights[weight.name]
        assert mine.shape == tuple(weight.dims)
        assert (mine.file is not None) == (weight.data_location == EXTERNAL)
        entries = {entry.key: entry.value for entry in weight.external_data}
        assert mine.file == entries.get("location")
        assert mine.offset == int(entries.get("offset", 0))
        assert mine.size == int(entries.get("length", len(weight.raw_data)))


def declared(info: onnx.ValueInfoProto) -> DeclaredTensor:
    """Return a tensor as protobuf's reader sees it."""
    tensor = info.type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    sizes = (
        size.dim_value if size.WhichOneof("value") == "dim_value" else None
        for size in tensor.shape.dim
    )
    return DeclaredTensor(np.dtype(dtype), tuple(sizes))


TARGET = Target(
    name="onnx",
    valid=[small_model().SerializeToString(), write(TREE)],
    inputs=st.one_of(damaged_trees(), damaged_trees(), damaged_bytes(damaged_trees())),
    check=check,
    examples=400,
)
