"""What export needs of a head: the contract that every module of this package fulfils."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper
from torch import Tensor, nn

from export.evaluation.scorer import Scorer
from export.evaluation.texts import GateTexts
from export.graph.builder import GraphBuilder
from export.graph.products import LinearOps
from export.models.config import EncoderConfig
from export.models.encoder import Encoder
from model_store.heads import Head, HeadRequest
from model_store.heads.head import Frozen
from model_store.layouts import Layout, Placement
from model_store.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class HeadGraph:
    """Where a head is written.

    Attributes:
        g: the graph.
        linear_ops: the graph's arithmetic.
        layout: the graph's layout.
        hidden: name of the trunk's output in the layout's shape: [B, S, H] or [T, H].
        rows: name of the same as ``hidden [T, H]``.
        config: sizes of the encoder.
    """

    g: GraphBuilder
    linear_ops: LinearOps
    layout: Layout
    hidden: str
    rows: str
    config: EncoderConfig

    def input(self, tensor: TensorSpec) -> str:
        """Declare an input of the head."""
        return self.g.input(tensor.name, _onnx_type(tensor), tensor.shape)

    def output(self, value: str, tensor: TensorSpec, **sizes: int) -> None:
        """Declare a value an output of the head.

        Args:
            value: its name in the graph.
            tensor: what it is.
            sizes: numbers in place of letters of the tensor's shape.
        """
        shape = [sizes.get(size, size) if isinstance(size, str) else size for size in tensor.shape]
        self.g.output(value, tensor.name, _onnx_type(tensor), shape)

    def gather(self, tensor: TensorSpec) -> str:
        """Declare an input of row numbers; return those rows of ``hidden [T, H]`` in float32."""
        gathered = self.g.op("Gather", [self.rows, self.input(tensor)], axis=0)
        return self.linear_ops.widened(self.g, gathered)


def _onnx_type(tensor: TensorSpec) -> int:
    onnx_type: TensorProto.DataType = helper.np_dtype_to_tensor_dtype(tensor.numpy_dtype)
    return onnx_type


TensorNames = Mapping[str, str]
"""A checkpoint's tensor names -> ours, as `Family.names`."""


@dataclass(frozen=True, slots=True)
class ExportHead:
    """One head's part of export.

    Attributes:
        head: the contract with the service.
        module: (sizes, encoder, options) -> a new torch module; None: the head has none.
        tensor_names: by family; a family may also name them itself (`Family.heads`).
        write: (module, graph) -> writes the head into the graph.
        reference: (module, hidden rows [T, H], requests, placement) -> the graph's outputs, by
            name, as torch computes them.
        sample: (random generator, tokens of a sequence) -> a request for verification.
        measure: (checkpoint, graph, texts) -> figures of how far the graph agrees with the
            checkpoint, for the quality gate.
        limits: what each figure must reach.
        fine_tuned: whether a checkpoint with this head is by default exported for such heads only.
        architecture: how the class names in ``config.json`` end that have this head, for heads
            whose tensors another head has too; None: the tensors suffice.
        read_options: ``config.json`` -> what the manifest says of the head; None: nothing.
        incomplete: first part of a tensor's name -> what to say where only such tensors exist.
    """

    head: Head
    module: Callable[[EncoderConfig, Encoder, Any], nn.Module] | None
    tensor_names: Mapping[str, TensorNames]
    write: Callable[[Any, HeadGraph], None]
    reference: Callable[[Any, Tensor, Sequence[Any], Placement], dict[str, Tensor]]
    sample: Callable[[np.random.Generator, int], HeadRequest]
    measure: Callable[[Scorer, Scorer, GateTexts], dict[str, float]]
    limits: Mapping[str, float]
    fine_tuned: bool = False
    architecture: str | None = None
    read_options: Callable[[Mapping[str, Any]], Frozen] | None = None
    incomplete: Mapping[str, str] = field(default_factory=dict)


def asked_rows(requests: Sequence[Any], placement: Placement) -> list[int]:
    """Return the ``[CLS]`` row of each sequence that a head is asked for."""
    starts = placement.starts[:-1].tolist()
    return [row for row, request in zip(starts, requests, strict=True) if request is not None]


def share_of_equal(pairs: Sequence[tuple[object, object]]) -> float:
    """Return the share of pairs whose parts are equal."""
    return float(np.mean([one == other for one, other in pairs]))
