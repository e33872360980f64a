"""The parts of the trunk that depend on the batch layout: inputs, embeddings, attention, norms."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from cloze.export.graph.builder import FUSED, GraphBuilder
from cloze.export.graph.layers import layer_norm
from cloze.export.graph.linear_ops import WORD_EMBEDDINGS, LinearOps
from cloze.export.models.encoder import Embeddings
from cloze.model_store import tensors
from cloze.model_store.layouts import Layout
from cloze.model_store.tensors import TensorSpec


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

    def embed(self, g: GraphBuilder, linear_ops: LinearOps, embeddings: Embeddings) -> str:
        """Declare the trunk's inputs and write the embeddings; return the first hidden states."""

    def attend(self, g: GraphBuilder, query: str, key: str, value: str, heads: int) -> str:
        """Write the attention of each sequence to itself."""

    def residual_norm(
        self, g: GraphBuilder, linear_ops: LinearOps, x: str, skip: str, layer: ResidualNorm
    ) -> str:
        """Write ``LayerNorm(x + skip + bias)``."""


class DenseLayout:
    """All sequences have one length. Hidden states are [B, S, H].

    Without padding no mask is needed, and the flash kernel of a CPU runs.
    """

    def embed(self, g: GraphBuilder, linear_ops: LinearOps, embeddings: Embeddings) -> str:
        """See `BatchLayout`.

        Do not use the fused `EmbedLayerNormalization`. Its table must be floats, and on a CPU it is
        a scalar loop: 1,046 us for 2,048 tokens of 384 numbers, where the operators here take
        700 us and convert the rows from integers as well (docs/decisions/0005).
        """
        input_ids = g.declare_input(tensors.INPUT_IDS, Layout.DENSE)
        terms = [linear_ops.look_up(g, WORD_EMBEDDINGS, embeddings.word.weight, input_ids)]
        if (types := embeddings.token_type) is not None:
            type_ids = g.declare_input(tensors.TOKEN_TYPE_IDS, Layout.DENSE)
            terms.append(linear_ops.look_up(g, tensors.TOKEN_TYPE_TABLE, types.weight, type_ids))
        positions = g.weight(tensors.POSITION_TABLE, embeddings.position.weight)
        first = g.weight("first_position", np.array([0], np.int64))
        length = g.op("Shape", [input_ids], start=1)
        terms.append(g.op("Slice", [positions, first, length]))
        return layer_norm(g, g.op("Sum", terms), "embeddings.norm", embeddings.norm)

    def attend(self, g: GraphBuilder, query: str, key: str, value: str, heads: int) -> str:
        """See `BatchLayout`."""
        return g.op("MultiHeadAttention", [query, key, value], domain=FUSED, num_heads=heads)

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

    def embed(self, g: GraphBuilder, linear_ops: LinearOps, embeddings: Embeddings) -> str:
        """See `BatchLayout`."""
        self._token_offset = g.declare_input(tensors.TOKEN_OFFSET, Layout.PACKED)
        self._cu_seqlens = g.declare_input(tensors.CU_SEQLENS, Layout.PACKED)

        def look_up(name: str, ids: TensorSpec, table: nn.Embedding) -> str:
            return linear_ops.look_up(g, name, table.weight, g.declare_input(ids, Layout.PACKED))

        words = look_up(WORD_EMBEDDINGS, tensors.INPUT_IDS, embeddings.word)
        rest = look_up(tensors.POSITION_TABLE, tensors.POSITION_IDS, embeddings.position)
        if embeddings.token_type is not None:
            type_ids, table = tensors.TOKEN_TYPE_IDS, embeddings.token_type
            types = look_up(tensors.TOKEN_TYPE_TABLE, type_ids, table)
            rest = g.op("Add", [rest, types])
        name = "embeddings.norm"
        return self._skip_norm(g, linear_ops, [words, rest], name, embeddings.norm)

    def attend(self, g: GraphBuilder, query: str, key: str, value: str, heads: int) -> str:
        """See `BatchLayout`."""
        inputs = [query, key, value, "", self._token_offset, self._cu_seqlens]
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
