"""The parts of the trunk that depend on the batch layout: places, attention, norms."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from cloze.export.graph.builder import FUSED, GraphBuilder
from cloze.export.graph.layers import layer_norm
from cloze.export.graph.linear_ops import LinearOps
from cloze.model_store import tensors
from cloze.model_store.layouts import Layout


@dataclass(frozen=True, slots=True)
class ResidualNorm:
    """The weights of one residual connection with its norm.

    Attributes:
        name: the norm's name in the model.
        bias: [H], the bias of the layer before the connection.
        norm: the LayerNorm after the connection.
    """

    name: str
    bias: Tensor
    norm: nn.LayerNorm


class BatchLayout(Protocol):
    """Writes the parts of the trunk that depend on the layout. One object writes one graph."""

    kind: Layout

    def declare_inputs(self, g: GraphBuilder) -> None:
        """Declare the inputs that describe the places of sequences in a batch."""

    def positions(self, g: GraphBuilder, linear_ops: LinearOps, table: Tensor) -> str:
        """Write the row of each token's position in a table [P, H]."""

    def norm_of_sum(
        self,
        g: GraphBuilder,
        linear_ops: LinearOps,
        terms: Sequence[str],
        name: str,
        norm: nn.LayerNorm,
    ) -> str:
        """Write ``LayerNorm`` of the sum of two or more terms."""

    def attend(
        self, g: GraphBuilder, operands: tuple[str, str, str], heads: int, bias: str = ""
    ) -> str:
        """Write the attention of each sequence to itself.

        Args:
            g: the graph.
            operands: names of queries, keys and values.
            heads: number of attention heads.
            bias: name of the bias of the scores [1, N, S, S]; "": nothing is added.
        """

    def residual_norm(
        self, g: GraphBuilder, linear_ops: LinearOps, x: str, skip: str, layer: ResidualNorm
    ) -> str:
        """Write ``LayerNorm(x + skip + bias)``."""


class DenseLayout:
    """All sequences have one length. Hidden states are [B, S, H].

    Without padding no mask is needed, and the flash kernel of a CPU runs.
    """

    kind = Layout.DENSE

    def declare_inputs(self, g: GraphBuilder) -> None:
        """See `BatchLayout`; the shape of the input ids says all."""

    def positions(
        self,
        g: GraphBuilder,
        linear_ops: LinearOps,  # noqa: ARG002
        table: Tensor,
    ) -> str:
        """See `BatchLayout`."""
        rows = g.weight(tensors.POSITION_TABLE, table)
        first = g.weight("first_position", np.array([0], np.int64))
        return g.op("Slice", [rows, first, g.op("Shape", [tensors.INPUT_IDS.name], start=1)])

    def norm_of_sum(
        self,
        g: GraphBuilder,
        linear_ops: LinearOps,  # noqa: ARG002
        terms: Sequence[str],
        name: str,
        norm: nn.LayerNorm,
    ) -> str:
        """See `BatchLayout`."""
        return layer_norm(g, g.op("Sum", terms), name, norm)

    def attend(
        self, g: GraphBuilder, operands: tuple[str, str, str], heads: int, bias: str = ""
    ) -> str:
        """See `BatchLayout`."""
        inputs = [*operands, *(["", "", bias] if bias else [])]
        return g.op("MultiHeadAttention", inputs, domain=FUSED, num_heads=heads)

    def residual_norm(
        self, g: GraphBuilder, linear_ops: LinearOps, x: str, skip: str, layer: ResidualNorm
    ) -> str:
        """See `BatchLayout`.

        Do not use the fused `SkipLayerNormalization`. On a CPU it is a scalar loop in onnxruntime
        1.31 and takes 974 us; the two operators here take 168 us (512 x 384, one thread of a
        Zen 4). Use one `Sum`, because the runtime would fuse two `Add`.
        """
        bias = linear_ops.vector(g, f"{layer.name}.skip.bias", layer.bias)
        return layer_norm(g, g.op("Sum", [x, skip, bias]), layer.name, layer.norm)


class PackedLayout:
    """Sequences of any lengths follow each other. Hidden states are [T, H].

    The variable-length flash kernel of CUDA runs only if queries, keys and values are three
    tensors and have no bias input.
    """

    kind = Layout.PACKED

    def declare_inputs(self, g: GraphBuilder) -> None:
        """See `BatchLayout`."""
        g.declare_input(tensors.TOKEN_OFFSET, Layout.PACKED)
        g.declare_input(tensors.CU_SEQLENS, Layout.PACKED)

    def positions(self, g: GraphBuilder, linear_ops: LinearOps, table: Tensor) -> str:
        """See `BatchLayout`."""
        position_ids = g.declare_input(tensors.POSITION_IDS, Layout.PACKED)
        return linear_ops.look_up(g, tensors.POSITION_TABLE, table, position_ids)

    def norm_of_sum(
        self,
        g: GraphBuilder,
        linear_ops: LinearOps,
        terms: Sequence[str],
        name: str,
        norm: nn.LayerNorm,
    ) -> str:
        """See `BatchLayout`."""
        first, *others = terms
        rest = reduce(lambda one, other: g.op("Add", [one, other]), others)
        return self._skip_norm(g, linear_ops, [first, rest], name, norm)

    def attend(
        self, g: GraphBuilder, operands: tuple[str, str, str], heads: int, bias: str = ""
    ) -> str:
        """See `BatchLayout`. A family whose scores have a bias has no packed graph."""
        assert not bias, "the variable-length kernel adds no bias to the scores"
        places = [tensors.TOKEN_OFFSET.name, tensors.CU_SEQLENS.name]
        inputs = [*operands, "", *places]
        return g.op("PackedMultiHeadAttention", inputs, domain=FUSED, num_heads=heads)

    def residual_norm(
        self, g: GraphBuilder, linear_ops: LinearOps, x: str, skip: str, layer: ResidualNorm
    ) -> str:
        """See `BatchLayout`."""
        bias = linear_ops.vector(g, f"{layer.name}.skip.bias", layer.bias)
        return self._skip_norm(g, linear_ops, [x, skip], layer.name, layer.norm, bias)

    @staticmethod
    def _skip_norm(
        g: GraphBuilder,
        linear_ops: LinearOps,
        terms: list[str],
        name: str,
        norm: nn.LayerNorm,
        bias: str = "",
    ) -> str:
        """Write ``LayerNorm`` of the sum of two terms and an optional bias."""
        scale = linear_ops.vector(g, f"{name}.weight", norm.weight)
        shift = linear_ops.vector(g, f"{name}.bias", norm.bias)
        inputs = [*terms, scale, shift, *([bias] if bias else [])]
        return g.op("SkipLayerNormalization", inputs, domain=FUSED, epsilon=norm.eps)
