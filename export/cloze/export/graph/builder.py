"""Collects nodes and weights, and saves them as an ONNX file and a file of weights.

`linear` and `layer_norm` write the layers that the trunk and the heads share, in fp32.
"""

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor, nn

from cloze.model_store.graph_checks import FUSED_DOMAIN
from cloze.model_store.layouts import Layout
from cloze.model_store.processor import PACKED_ALIGNMENT
from cloze.model_store.tensors import TensorSpec

OPSET = 20
"""The version of ONNX's operators of graphs that have no newer operator."""

_NEWER: Final = {"Attention": 23, "block_size": 21}
"""Operators and attributes that are newer than `OPSET`, with their versions."""

_IR_VERSIONS: Final = {OPSET: 10, 21: 10, 23: 11}
"""Versions of operators -> the first file format for them; older runtimes refuse newer formats."""

_INLINE_BYTES = 1024
_ALIGNMENT = 4096  # bytes, one page: a runtime may map a weight instead of copying it

FUSED = FUSED_DOMAIN
"""The domain of onnxruntime's fused operators."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The place of a weight in a file, and the properties of its values.

    Attributes:
        offset: the first byte of the weight in the file.
        length: the weight's size in bytes.
        checksum: the CRC-32 of the bytes.
    """

    file: str
    offset: int
    length: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    checksum: int


class GraphBuilder:
    """An unfinished ONNX graph. Values are referred to by name.

    Args:
        half: store matrices as fp16 and convert them with a Cast, which a runtime computes once
            when it opens the graph. The values of the matrices must be fp16 numbers already.

    Attributes:
        opset: the version of ONNX's operators that the nodes so far need.
    """

    def __init__(self, *, half: bool = False) -> None:
        self.opset, self._half = OPSET, half
        self._nodes: list[onnx.NodeProto] = []
        self._named: set[str] = set()
        self._own_names: dict[str, list[str]] = {}
        self._weights: dict[str, NDArray[np.generic]] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, dtype: int, shape: Sequence[str | int]) -> str:
        """Declare an input of the graph; a string in the shape is a free dimension."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def declare_input(self, tensor: TensorSpec, layout: Layout) -> str:
        """Declare an input of the graph by its specification, and return its name."""
        return self.input(tensor.name, onnx_type(tensor), tensor.shape_in(layout))

    def output(self, value: str, name: str, dtype: int, shape: Sequence[str | int]) -> None:
        """Declare a value as an output of the graph, under ``name``."""
        self._nodes.append(helper.make_node("Identity", [value], [name], name=name))
        self._outputs.append(helper.make_tensor_value_info(name, dtype, shape))

    def weight(
        self, name: str, values: Tensor | NDArray[np.generic], *, exact: bool = False
    ) -> str:
        """Add a constant and return its name; a layer that stands twice adds its weights once.

        Args:
            exact: store the values as they are, even if matrices are stored as fp16.
        """
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
        if name in self._named:
            half = self._weights.get(f"{name}.fp16")
            same = self._weights[name] if half is None else half
            assert np.array_equal(same, array), f"two different weights are called {name}"
            return name
        self._named.add(name)
        array = np.asarray(array, order="C")  # unlike ascontiguousarray, keeps a scalar a scalar
        if exact or not (self._half and array.dtype == np.float32 and array.ndim > 1):
            self._weights[name] = array
            return name
        stored = array.astype(np.float16)
        assert np.array_equal(stored, array), f"{name} was not rounded to fp16 before"
        self._weights[f"{name}.fp16"] = stored
        self._nodes.append(
            helper.make_node("Cast", [f"{name}.fp16"], [name], name=name, to=TensorProto.FLOAT)
        )
        return name

    def ints(self, *values: int) -> str:
        """Add a constant int64 [n], such as a shape or an axis, and return its name."""
        return self.weight("_".join(map(str, ("ints", *values))), np.array(values, np.int64))

    def number(self, value: float) -> str:
        """Add a constant without an axis: int64 for an int, else float32; return its name."""
        dtype = np.int64 if isinstance(value, int) else np.float32
        return self.weight(f"number_{value!r}", np.array(value, dtype))

    def own(self, weight: str) -> str:
        """Return a name of a weight that no other node has: the weight's own, then further ones.

        Without int8 instructions, onnxruntime 1.31 rewrites the signed weights of each product, and
        fails if two products read a weight of one name. The bytes are stored once.
        """
        names = self._own_names.setdefault(weight, [])
        names.append(f"{weight}.{len(names) + 1}" if names else weight)
        self._weights[names[-1]] = self._weights[weight]
        return names[-1]

    def op(
        self,
        kind: str,
        inputs: Sequence[str],
        *,
        domain: str = "",
        outputs: int = 1,
        **attributes: Any,
    ) -> str:
        """Add a node and return its first output. An empty string is an absent input."""
        name = f"{kind}_{len(self._nodes)}"
        self.opset = max(self.opset, *(_NEWER.get(one, OPSET) for one in (kind, *attributes)))
        names = [name if number == 0 else f"{name}_{number}" for number in range(outputs)]
        self._nodes.append(
            helper.make_node(kind, inputs, names, name=name, domain=domain, **attributes)
        )
        return name

    def operators(self) -> dict[str, int]:
        """Return the number of nodes of each operator, by name."""
        return dict(sorted(Counter(node.op_type for node in self._nodes).items()))

    def save(
        self, graph_file: Path, weights_file: Path, shared: Mapping[str, StoredWeight] | None = None
    ) -> dict[str, StoredWeight]:
        """Write the graph to one file, and its larger weights to a second file.

        A protobuf file must stay below 2 GB, so it cannot hold the weights.

        Args:
            weights_file: the file of raw weights to write, in the same folder; not written if
                all larger weights are shared.
            shared: weights that another graph of the same model has stored in the folder, by name.

        Returns:
            The places of this graph's larger weights, by name.
        """
        with ExitStack() as files:
            writer = _WeightsWriter(weights_file, shared or {}, files)
            initializers = [writer.store(*item) for item in self._weights.items()]
        sizes = {name: array.nbytes for name, array in self._weights.items()}
        # Last, since onnxruntime writes packed weights without gaps: behind one of an odd size,
        # they start off the boundary that its kernels need. What it computes on opening has another
        # order, so the server checks the boundaries (`cloze.service.engine.session.is_aligned`).
        initializers.sort(key=lambda tensor: sizes[tensor.name] % PACKED_ALIGNMENT != 0)
        graph = helper.make_graph(self._nodes, "cloze", self._inputs, self._outputs, initializers)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(FUSED, 1)]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=_IR_VERSIONS[self.opset], producer_name="cloze"
        )
        onnx.save_model(model, graph_file)
        return writer.stored


class _WeightsWriter:
    """Writes larger weights to a file, and refers to the weights that are stored elsewhere."""

    def __init__(self, file: Path, shared: Mapping[str, StoredWeight], files: ExitStack) -> None:
        self._file, self._shared, self._files = file, shared, files
        self._stream: BinaryIO | None = None
        self.stored: dict[str, StoredWeight] = {}
        self._places: dict[int, StoredWeight] = {}

    def store(self, name: str, array: NDArray[Any]) -> TensorProto:
        """Store a weight; return the graph's reference to the weight, or a small weight itself."""
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        tensor = TensorProto(name=name, dims=array.shape, data_type=dtype)
        if array.nbytes < _INLINE_BYTES:
            tensor.raw_data = array.tobytes()
            return tensor
        checksum = zlib.crc32(array.data)
        place = self._shared.get(name) or self._places.get(id(array))
        place = self._places[id(array)] = place or self._append(array, checksum)
        properties = (array.dtype, array.shape, checksum)
        assert (place.dtype, place.shape, place.checksum) == properties, (
            f"{name} is another weight in {place.file}"
        )
        self.stored[name] = place
        tensor.data_location = TensorProto.EXTERNAL
        fields = {"location": place.file, "offset": place.offset, "length": place.length}
        for key, value in fields.items():
            tensor.external_data.add(key=key, value=str(value))
        return tensor

    def _append(self, array: NDArray[Any], checksum: int) -> StoredWeight:
        if self._stream is None:
            self._stream = self._files.enter_context(self._file.open("wb"))
        stream = self._stream
        stream.write(b"\0" * (-stream.tell() % _ALIGNMENT))
        offset = stream.tell()
        stream.write(array.data)
        return StoredWeight(
            self._file.name, offset, array.nbytes, array.dtype, array.shape, checksum
        )


def onnx_type(tensor: TensorSpec) -> int:
    """Return the ONNX element type of a tensor."""
    element_type: TensorProto.DataType = helper.np_dtype_to_tensor_dtype(tensor.numpy_dtype)
    return element_type


def linear(g: GraphBuilder, x: str, name: str, layer: nn.Linear) -> str:
    """Write ``x @ W^T + b``: [..., in] -> [..., out]."""
    product = g.op("MatMul", [x, g.weight(f"{name}.weight", layer.weight.t())])
    if layer.bias is None:
        return product
    return g.op("Add", [product, g.weight(f"{name}.bias", layer.bias)])


def layer_norm(g: GraphBuilder, x: str, name: str, layer: nn.LayerNorm) -> str:
    """Write LayerNorm over the last axis."""
    inputs = [x, g.weight(f"{name}.weight", layer.weight)]
    if layer.bias is not None:
        inputs.append(g.weight(f"{name}.bias", layer.bias))
    return g.op("LayerNormalization", inputs, axis=-1, epsilon=layer.eps)
