"""What differs between the layouts: how tokens come in, how a sequence attends to itself, which norm is fused."""

from typing import Protocol

from onnx import TensorProto
from torch import Tensor, nn

from export.graph.builder import FUSED, GraphBuilder
from export.graph.layers import norm
from export.graph.products import LinearOps
from export.models.encoder import Embeddings
from model_store import tensors


class BatchLayout(Protocol):
    """How the tokens of a batch lie. A graph has one of it."""

    def embed(self, g: GraphBuilder, linear_ops: LinearOps, embeddings: Embeddings) -> str:
        """Declare the inputs and look the tokens up; returns the first hidden states."""

    def attend(self, g: GraphBuilder, query: str, key: str, value: str, heads: int) -> str:
        """Attention of each sequence to itself."""

    def residual_norm(
        self,
        g: GraphBuilder,
        linear_ops: LinearOps,
        x: str,
        skip: str,
        name: str,
        bias: Tensor,
        layer: nn.LayerNorm,
    ) -> str:
        """``LayerNorm(x + skip + bias)``."""


class Dense:
    """All sequences of one length: no padding, hence no mask, and the flash kernel on a CPU. Hidden states are [B, S, H]."""

    def embed(self, g: GraphBuilder, linear_ops: LinearOps, embeddings: Embeddings) -> str:
        """See `BatchLayout`."""
        input_ids = g.input(tensors.INPUT_IDS.name, TensorProto.INT32, ["B", "S"])
        types, type_weight = "", ""
        if embeddings.token_type is not None:
            types = g.input(tensors.TOKEN_TYPE_IDS.name, TensorProto.INT32, ["B", "S"])
            type_weight = g.weight("embeddings.token_type", embeddings.token_type.weight)
        return g.op(
            "EmbedLayerNormalization",
            [
                input_ids,
                types,
                linear_ops.table(g, "embeddings.word", embeddings.word.weight),
                g.weight("embeddings.position", embeddings.position.weight),
                type_weight,
                g.weight("embeddings.norm.weight", embeddings.norm.weight),
                g.weight("embeddings.norm.bias", embeddings.norm.bias),
            ],
            domain=FUSED,
            outputs=2,
            epsilon=embeddings.norm.eps,
        )

    def attend(self, g: GraphBuilder, query: str, key: str, value: str, heads: int) -> str:
        """See `BatchLayout`."""
        return g.op("MultiHeadAttention", [query, key, value], domain=FUSED, num_heads=heads)

    def residual_norm(
        self,
        g: GraphBuilder,
        linear_ops: LinearOps,
        x: str,
        skip: str,
        name: str,
        bias: Tensor,
        layer: nn.LayerNorm,
    ) -> str:
        """See `BatchLayout`.

        Not the fused `SkipLayerNormalization`: on a CPU that is a scalar loop in onnxruntime 1.31, 974 us where these two take
        168 (512 x 384, one thread of a Zen 4). `Sum` and not two `Add`, which the runtime would fuse into it.
        """
        return norm(
            g, g.op("Sum", [x, skip, linear_ops.vector(g, f"{name}.skip.bias", bias)]), name, layer
        )


class Packed:
    """Sequences of any lengths, one after the other: the variable-length flash kernel of CUDA. Hidden states are [T, H].

    That kernel runs only where queries, keys and values come as three tensors and without a bias.
    """

    def embed(self, g: GraphBuilder, linear_ops: LinearOps, embeddings: Embeddings) -> str:
        """See `BatchLayout`."""
        self._offset = g.input(tensors.TOKEN_OFFSET.name, TensorProto.INT32, ["B", "S"])
        self._starts = g.input(tensors.CU_SEQLENS.name, TensorProto.INT32, ["B + 1"])

        def look_up(name: str, ids: str, table: nn.Embedding) -> str:
            ids = g.input(ids, TensorProto.INT32, ["T"])
            return g.op(
                "Gather", [linear_ops.table(g, f"embeddings.{name}", table.weight), ids], axis=0
            )

        words = look_up("word", tensors.INPUT_IDS.name, embeddings.word)
        rest = look_up("position", tensors.POSITION_IDS.name, embeddings.position)
        if embeddings.token_type is not None:
            rest = g.op(
                "Add",
                [rest, look_up("token_type", tensors.TOKEN_TYPE_IDS.name, embeddings.token_type)],
            )
        return self._skip_norm(g, linear_ops, [words, rest], "embeddings.norm", embeddings.norm)

    def attend(self, g: GraphBuilder, query: str, key: str, value: str, heads: int) -> str:
        """See `BatchLayout`."""
        inputs = [query, key, value, "", self._offset, self._starts]
        return g.op("PackedMultiHeadAttention", inputs, domain=FUSED, num_heads=heads)

    def residual_norm(
        self,
        g: GraphBuilder,
        linear_ops: LinearOps,
        x: str,
        skip: str,
        name: str,
        bias: Tensor,
        layer: nn.LayerNorm,
    ) -> str:
        """See `BatchLayout`."""
        return self._skip_norm(
            g, linear_ops, [x, skip], name, layer, linear_ops.vector(g, f"{name}.skip.bias", bias)
        )

    @staticmethod
    def _skip_norm(
        g: GraphBuilder,
        linear_ops: LinearOps,
        inputs: list[str],
        name: str,
        layer: nn.LayerNorm,
        bias: str = "",
    ) -> str:
        scale, shift = (
            linear_ops.vector(g, f"{name}.weight", layer.weight),
            linear_ops.vector(g, f"{name}.bias", layer.bias),
        )
        inputs = [*inputs, scale, shift, *([bias] if bias else [])]
        return g.op("SkipLayerNormalization", inputs, domain=FUSED, epsilon=layer.eps)
