"""The graph to which blocks write: one precision, and one layout of batches."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce
from typing import ClassVar

import numpy as np
from torch import Tensor, nn

from cloze.export.graph.builder import FUSED, layer_norm
from cloze.export.graph.linear_ops import LinearOps
from cloze.model_store import tensors
from cloze.model_store.layouts import Layout
from cloze.model_store.tensors import TensorSpec


class TrunkGraph(ABC):
    """The unfinished graph of a trunk. Its subclasses write what depends on the layout.

    Args:
        linear_ops: writes products and constants in the graph's precision.
    """

    layout: ClassVar[Layout]

    def __init__(self, linear_ops: LinearOps) -> None:
        self.linear_ops, self.g = linear_ops, linear_ops.g

    def declare(self, tensor: TensorSpec) -> str:
        """Declare an input of the graph."""
        return self.g.declare_input(tensor, self.layout)

    @abstractmethod
    def positions(self, table: Tensor) -> str:
        """Write the row of each token's position in a table [P, H]."""

    @abstractmethod
    def norm_of_sum(self, terms: Sequence[str], name: str, norm: nn.LayerNorm) -> str:
        """Write ``LayerNorm`` of the sum of terms."""

    @abstractmethod
    def attend(self, operands: tuple[str, str, str], heads: int, bias: str = "") -> str:
        """Write the attention of each sequence to itself.

        Args:
            operands: names of queries, keys and values.
            heads: N, the number of attention heads.
            bias: name of what is added to the scores [1, N, S, S]; "": nothing is added.
        """

    @abstractmethod
    def residual_norm(self, x: str, skip: str, bias: Tensor, name: str, norm: nn.LayerNorm) -> str:
        """Write ``LayerNorm(x + skip + bias)``, with the bias [H] of the layer before."""


class DenseTrunk(TrunkGraph):
    """All sequences have one length. Hidden states are [B, S, H].

    Without padding no mask is needed, and the flash kernel of a CPU runs.
    """

    layout = Layout.DENSE

    def positions(self, table: Tensor) -> str:
        """See `TrunkGraph`."""
        g = self.g
        rows = g.weight(tensors.POSITION_TABLE, table)
        first = g.weight("first_position", np.array([0], np.int64))
        return g.op("Slice", [rows, first, g.op("Shape", [tensors.INPUT_IDS.name], start=1)])

    def norm_of_sum(self, terms: Sequence[str], name: str, norm: nn.LayerNorm) -> str:
        """See `TrunkGraph`."""
        total = terms[0] if len(terms) == 1 else self.g.op("Sum", terms)
        return layer_norm(self.g, total, name, norm)

    def attend(self, operands: tuple[str, str, str], heads: int, bias: str = "") -> str:
        """See `TrunkGraph`."""
        inputs = [*operands, *(["", "", bias] if bias else [])]
        return self.g.op("MultiHeadAttention", inputs, domain=FUSED, num_heads=heads)

    def residual_norm(self, x: str, skip: str, bias: Tensor, name: str, norm: nn.LayerNorm) -> str:
        """See `TrunkGraph`.

        Do not use the fused `SkipLayerNormalization`. On a CPU it is a scalar loop in onnxruntime
        1.31 and takes 974 us; the two operators here take 168 us (512 x 384, one thread of a
        Zen 4). Use one `Sum`, because the runtime would fuse two `Add`.
        """
        total = [x, skip, self.linear_ops.vector(f"{name}.skip.bias", bias)]
        return layer_norm(self.g, self.g.op("Sum", total), name, norm)


class PackedTrunk(TrunkGraph):
    """Sequences of any lengths follow each other. Hidden states are [T, H].

    The variable-length flash kernel of CUDA runs only if queries, keys and values are three
    tensors and have no bias input.
    """

    layout = Layout.PACKED

    def __init__(self, linear_ops: LinearOps) -> None:
        super().__init__(linear_ops)
        self.declare(tensors.TOKEN_OFFSET)
        self.declare(tensors.CU_SEQLENS)

    def positions(self, table: Tensor) -> str:
        """See `TrunkGraph`."""
        position_ids = self.declare(tensors.POSITION_IDS)
        return self.linear_ops.look_up(tensors.POSITION_TABLE, table, position_ids)

    def norm_of_sum(self, terms: Sequence[str], name: str, norm: nn.LayerNorm) -> str:
        """See `TrunkGraph`."""
        first, *others = terms
        rest = reduce(lambda one, other: self.g.op("Add", [one, other]), others)
        return self._skip_norm([first, rest], name, norm)

    def attend(self, operands: tuple[str, str, str], heads: int, bias: str = "") -> str:
        """See `TrunkGraph`. A family whose scores have a bias has no packed graph."""
        assert not bias, "the variable-length kernel adds no bias to the scores"
        places = [tensors.TOKEN_OFFSET.name, tensors.CU_SEQLENS.name]
        inputs = [*operands, "", *places]
        return self.g.op("PackedMultiHeadAttention", inputs, domain=FUSED, num_heads=heads)

    def residual_norm(self, x: str, skip: str, bias: Tensor, name: str, norm: nn.LayerNorm) -> str:
        """See `TrunkGraph`."""
        written = self.linear_ops.vector(f"{name}.skip.bias", bias)
        return self._skip_norm([x, skip], name, norm, written)

    def _skip_norm(self, terms: list[str], name: str, norm: nn.LayerNorm, *bias: str) -> str:
        """Write ``LayerNorm`` of the sum of two terms and an optional bias."""
        scale = self.linear_ops.vector(f"{name}.weight", norm.weight)
        shift = self.linear_ops.vector(f"{name}.bias", norm.bias)
        inputs = [*terms, scale, shift, *bias]
        return self.g.op("SkipLayerNormalization", inputs, domain=FUSED, epsilon=norm.eps)
