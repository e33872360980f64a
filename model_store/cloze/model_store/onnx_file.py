"""Reads an ONNX file without its weights: operators, inputs, outputs and the places of weights.

Only what `cloze export` writes is accepted. A sub-graph, a function or a tensor in an attribute
makes the file unreadable.

Source: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from cloze.model_store.protobuf import Field, Message, Wire

T = TypeVar("T")

_INTEGER: Final = Wire.INTEGER

_MODEL: Final = {
    1: Field("ir_version", _INTEGER),
    2: Field("producer_name"),
    3: Field("producer_version"),
    4: Field("domain"),
    5: Field("model_version", _INTEGER),
    6: Field("doc_string"),
    7: Field("graph"),
    8: Field("opset_import", repeated=True),
    14: Field("metadata", refused=True),
    20: Field("training information", refused=True),
    25: Field("functions", refused=True),
}
_GRAPH: Final = {
    1: Field("node", repeated=True),
    2: Field("name"),
    5: Field("initializer", repeated=True),
    10: Field("doc_string"),
    11: Field("input", repeated=True),
    12: Field("output", repeated=True),
    15: Field("sparse weights", refused=True),
}
_NODE: Final = {
    1: Field("input", repeated=True),
    2: Field("output", repeated=True),
    3: Field("name"),
    4: Field("op_type"),
    5: Field("attribute", repeated=True),
    6: Field("doc_string"),
    7: Field("domain"),
}
_ATTRIBUTE: Final = {
    1: Field("name"),
    2: Field("f", Wire.FIXED32),
    3: Field("i", _INTEGER),
    4: Field("s"),
    5: Field("a tensor", refused=True),
    6: Field("a sub-graph", refused=True),
    8: Field("ints", _INTEGER, repeated=True),
    10: Field("tensors", refused=True),
    11: Field("sub-graphs", refused=True),
    13: Field("doc_string"),
    20: Field("type", _INTEGER),
    22: Field("a sparse tensor", refused=True),
    23: Field("sparse tensors", refused=True),
}
_WEIGHT: Final = {
    1: Field("dims", _INTEGER, repeated=True),
    2: Field("data_type", _INTEGER),
    8: Field("name"),
    9: Field("raw_data"),
    12: Field("doc_string"),
    13: Field("external_data", repeated=True),
    14: Field("data_location", _INTEGER),
}
_ENTRY: Final = {1: Field("key"), 2: Field("value")}
_TENSOR: Final = {1: Field("name"), 2: Field("type"), 3: Field("doc_string")}
_TYPE: Final = {1: Field("tensor_type")}
_TENSOR_TYPE: Final = {1: Field("elem_type", _INTEGER), 2: Field("shape")}
_SHAPE: Final = {1: Field("dim", repeated=True)}
_DIMENSION: Final = {1: Field("dim_value", _INTEGER), 2: Field("dim_param")}

_DTYPES: Final = {
    number: np.dtype(name)
    for number, name in (
        (1, "float32"),
        (2, "uint8"),
        (3, "int8"),
        (6, "int32"),
        (7, "int64"),
        (10, "float16"),
    )
}
"""The element types that graphs of bundles have, by their numbers in ONNX."""

_INTERNAL: Final = 0
_EXTERNAL: Final = 1
_MAX_RANK: Final = 8


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """An input or an output of a graph.

    Attributes:
        shape: the tensor's sizes; None stands for a size that differs per batch.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class DeclaredWeight:
    """A weight, inside or outside the ONNX file.

    Attributes:
        file: where the weight is outside the ONNX file; None: the weight is inside.
        offset: the first byte of the weight in `file`.
    """

    shape: tuple[int, ...]
    size: int
    file: str | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """The graph of an ONNX file.

    Attributes:
        operators: (domain, operator) of every node.
    """

    operators: frozenset[tuple[str, str]]
    inputs: Mapping[str, DeclaredTensor]
    outputs: Mapping[str, DeclaredTensor]
    weights: Mapping[str, DeclaredWeight]


def parse_onnx(data: bytes) -> OnnxGraph:
    """Parse an ONNX file.

    Raises:
        ValueError: the bytes are not an ONNX file, or have a part that no bundle may have.
    """
    model = Message("model", memoryview(data), _MODEL)
    if "graph" not in model:
        raise ValueError("it has no graph")
    graph = Message("graph", model.parts("graph")[0], _GRAPH)
    return OnnxGraph(
        operators=frozenset(map(_operator, graph.parts("node"))),
        inputs=_by_name("inputs", map(_declared, graph.parts("input"))),
        outputs=_by_name("outputs", map(_declared, graph.parts("output"))),
        weights=_by_name("weights", map(_weight, graph.parts("initializer"))),
    )


def _by_name(kind: str, parts: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return parts of a graph by name. Of two with one name, a runtime may use the other."""
    by_name: dict[str, T] = {}
    for name, part in parts:
        if name in by_name:
            raise ValueError(f"the graph has two {kind} {name!r}")
        by_name[name] = part
    return by_name


def _operator(data: memoryview) -> tuple[str, str]:
    node = Message("node", data, _NODE)
    for attribute in node.parts("attribute"):
        Message("attribute", attribute, _ATTRIBUTE)
    return node.text("domain"), node.text("op_type")


def _declared(data: memoryview) -> tuple[str, DeclaredTensor]:
    """Return an input or an output with its name."""
    declared = Message("tensor", data, _TENSOR)
    name = declared.text("name")
    kind = Message("type", _only(declared, "type", name), _TYPE)
    tensor = Message("tensor type", _only(kind, "tensor_type", name), _TENSOR_TYPE)
    shape = Message("shape", _only(tensor, "shape", name), _SHAPE)
    sizes = tuple(map(_size, shape.parts("dim")))
    return name, DeclaredTensor(_dtype(tensor.integer("elem_type"), name), sizes)


def _only(message: Message, part: str, name: str) -> memoryview:
    if part not in message:
        raise ValueError(f"the tensor {name!r} has no {part}")
    return message.parts(part)[0]


def _size(data: memoryview) -> int | None:
    dimension = Message("dimension", data, _DIMENSION)
    if "dim_value" in dimension and "dim_param" in dimension:  # a runtime reads the last one
        raise ValueError("a dimension has both a size and a name")
    return dimension.integer("dim_value") if "dim_value" in dimension else None


def _dtype(number: int, name: str) -> np.dtype[np.generic]:
    if number not in _DTYPES:
        raise ValueError(f"{name!r} has the element type {number}, which no bundle may have")
    return _DTYPES[number]


def _weight(data: memoryview) -> tuple[str, DeclaredWeight]:
    """Return a weight with its name, after a check of its size."""
    weight = Message("weight", data, _WEIGHT)
    name, shape = weight.text("name"), tuple(weight.integers("dims"))
    if len(shape) > _MAX_RANK or any(size < 0 for size in shape):
        raise ValueError(f"the weight {name!r} has the shape {shape[: _MAX_RANK + 1]}")
    needed = math.prod(shape) * _dtype(weight.integer("data_type"), name).itemsize
    location = weight.integer("data_location")
    if location not in (_INTERNAL, _EXTERNAL):  # a runtime reads only 32 bits of the number
        raise ValueError(f"the weight {name!r} has the data location {location}")
    is_outside = location == _EXTERNAL
    if is_outside != ("external_data" in weight) or (is_outside and "raw_data" in weight):
        raise ValueError(f"the weight {name!r} is both inside and outside the file")
    file, offset, size = None, 0, sum(map(len, weight.parts("raw_data")))
    if is_outside:
        file, offset, size = _place(name, weight.parts("external_data"))
    if size != needed:
        raise ValueError(
            f"the weight {name!r} has {size} bytes, but its shape {shape} needs {needed}"
        )
    return name, DeclaredWeight(shape, size, file, offset)


def _place(name: str, entries: list[memoryview]) -> tuple[str, int, int]:
    """Return the file, the offset and the bytes of a weight outside the ONNX file."""
    parsed = [Message("entry", entry, _ENTRY) for entry in entries]
    place = {entry.text("key"): entry.text("value") for entry in parsed}
    numbers = [place.get(key, "") for key in ("offset", "length")]
    if (
        len(parsed) != 3
        or place.keys() != {"location", "offset", "length"}
        or not all(re.fullmatch("[0-9]{1,18}", number) for number in numbers)
    ):
        raise ValueError(f"the weight {name!r} has a malformed place: {place}")
    return place["location"], int(numbers[0]), int(numbers[1])
