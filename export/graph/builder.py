"""Collects nodes and weights, and saves them as an ONNX file with its weights beside it. Knows no BERT."""

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor

OPSET = 20
_IR_VERSION = 10  # the first that may carry opset 20 and 21; older runtimes refuse newer ones
_INLINE_BYTES = 1024
_ALIGNMENT = 4096  # bytes: a page, so that a runtime may map a weight instead of copying it

FUSED = "com.microsoft"
"""The domain of onnxruntime's fused operators."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight in a file: its bytes, and what they are."""

    file: str
    offset: int
    length: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    checksum: int


class GraphBuilder:
    """An ONNX graph in the making. Values are referred to by name.

    Args:
        half: keep matrices as fp16 and widen them by a Cast, which a runtime folds when it opens the graph. Their values must
            be fp16 numbers already.
    """

    def __init__(self, *, half: bool = False) -> None:
        self._half = half
        self._nodes: list[onnx.NodeProto] = []
        self._named: set[str] = set()
        self._weights: dict[str, NDArray[np.generic]] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, dtype: int, shape: Sequence[str | int]) -> str:
        """Declare an input of the graph; a string in the shape is a free dimension."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, value: str, name: str, dtype: int, shape: Sequence[str | int]) -> None:
        """Declare a value an output of the graph, under ``name``."""
        self._nodes.append(helper.make_node("Identity", [value], [name], name=name))
        self._outputs.append(helper.make_tensor_value_info(name, dtype, shape))

    def weight(self, name: str, values: Tensor | NDArray[np.generic]) -> str:
        """Add a constant, once: a name that is there already stands for the same values."""
        if name not in self._named:
            self._named.add(name)
            array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
            array = np.asarray(array, order="C")  # unlike ascontiguousarray, leaves a scalar one
            if self._half and array.dtype == np.float32 and array.ndim > 1:
                stored = array.astype(np.float16)
                assert np.array_equal(stored, array), f"{name} was not rounded to fp16 before"
                self._weights[f"{name}.fp16"] = stored
                self._nodes.append(
                    helper.make_node(
                        "Cast", [f"{name}.fp16"], [name], name=name, to=TensorProto.FLOAT
                    )
                )
            else:
                self._weights[name] = array
        return name

    def op(
        self,
        kind: str,
        inputs: Sequence[str],
        *,
        domain: str = "",
        outputs: int = 1,
        **attributes: Any,
    ) -> str:
        """Add a node; returns its first output. An empty string is an absent input."""
        name = f"{kind}_{len(self._nodes)}"
        names = [name if number == 0 else f"{name}_{number}" for number in range(outputs)]
        self._nodes.append(
            helper.make_node(kind, inputs, names, name=name, domain=domain, **attributes)
        )
        return name

    def operators(self) -> dict[str, int]:
        """How often each operator stands in the graph, by name."""
        return dict(sorted(Counter(node.op_type for node in self._nodes).items()))

    def save(
        self, graph_file: Path, weights_file: Path, there: Mapping[str, Stored] | None = None
    ) -> dict[str, Stored]:
        """Write the graph, and its larger weights to a file beside it, so that no protobuf nears its 2 GB limit.

        Args:
            graph_file: the ``.onnx`` file to write.
            weights_file: the raw weights, in the same folder; not written if all of them lie elsewhere.
            there: weights that another graph of the same model has stored in that folder: they are shared, by name.

        Returns:
            Where this graph's larger weights lie.
        """
        stored: dict[str, Stored] = {}
        initializers = []
        with ExitStack() as files:
            stream = None
            for name, array in self._weights.items():
                tensor = TensorProto(
                    name=name,
                    dims=array.shape,
                    data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
                )
                if array.nbytes < _INLINE_BYTES:
                    tensor.raw_data = array.tobytes()
                else:
                    place, checksum = (there or {}).get(name), zlib.crc32(array.data)
                    if place is None:
                        stream = stream or files.enter_context(weights_file.open("wb"))
                        stream.write(b"\0" * (-stream.tell() % _ALIGNMENT))
                        place = Stored(
                            weights_file.name,
                            stream.tell(),
                            array.nbytes,
                            array.dtype,
                            array.shape,
                            checksum,
                        )
                        stream.write(array.data)
                    assert (place.dtype, place.shape, place.checksum) == (
                        array.dtype,
                        array.shape,
                        checksum,
                    ), f"{name} is another weight in {place.file}"
                    stored[name] = place
                    tensor.data_location = TensorProto.EXTERNAL
                    for key, value in {
                        "location": place.file,
                        "offset": place.offset,
                        "length": place.length,
                    }.items():
                        tensor.external_data.add(key=key, value=str(value))
                initializers.append(tensor)
        graph = helper.make_graph(self._nodes, "cloze", self._inputs, self._outputs, initializers)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(FUSED, 1)]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="cloze"
        )
        onnx.save_model(model, graph_file)
        return stored
