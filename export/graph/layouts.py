"""What differs between the layouts: how tokens come in, how a sequence attends to itself, which norm is fused."""

from typing import Protocol

from onnx import TensorProto
from torch import Tensor, nn

from export.graph.builder import FUSED, GraphBuilder
from export.graph.layers import norm
from export.graph.products import Products
from export.models.encoder import Embeddings
from model_store import interface


class Tokens(Protocol):
    """How the tokens of a batch lie. A graph has one of it."""

    def embed(self, g: GraphBuilder, products: Products, embeddings: Embeddings) -> str:
        """Declare the inputs and look the tokens up; returns the first hidden states."""

    def attend(self, g: GraphBuilder, query: str, key: str, value: str, heads: int) -> str:
        """Attention of each sequence to itself."""

    def residual_norm(
        self, g: GraphBuilder, products: Products, x: str, skip: str, name: str, bias: Tensor, layer: nn.LayerNorm
    ) -> str:
        """``LayerNorm(x + skip + bias)``."""


class Dense:
    """All sequences of one length: no padding, hence no mask, and the flash kernel on a CPU. Hidden states are [B, S, H]."""

    def embed(self, g: GraphBuilder, products: Products, embeddings: Embeddings) -> str:
        """See `Tokens`."""
        input_ids = g.input(interface.INPUT_IDS, TensorProto.INT32, ["B", "S"])
        types, type_weight = "", ""
        if embeddings.token_type is not None:
            types = g.input(interface.TOKEN_TYPE_IDS, TensorProto.INT32, ["B", "S"])
            type_weight = g.weight("embeddings.token_type", embeddings.token_type.weight)
        return g.op(
            "EmbedLayerNormalization",
            [
                input_ids,
                types,
                products.table(g, "embeddings.word", embeddings.word.weight),
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
        """See `Tokens`."""
        return g.op("MultiHeadAttention", [query, key, value], domain=FUSED, num_heads=heads)

    def residual_norm(
        self, g: GraphBuilder, products: Products, x: str, skip: str, name: str, bias: Tensor, layer: nn.LayerNorm
    ) -> str:
        """See `Tokens`.

        Not the fused `SkipLayerNormalization`: on a CPU that is a scalar loop in onnxruntime 1.31, 974 us where these two take
        168 (512 x 384, one thread of a Zen 4). `Sum` and not two `Add`, which the runtime would fuse into it.
        """
        return norm(g, g.op("Sum", [x, skip, products.vector(g, f"{name}.skip.bias", bias)]), name, layer)


class Packed:
    """Sequences of any lengths, one after the other: the variable-length flash kernel of CUDA. Hidden states are [T, H].

    That kernel runs only where queries, keys and values come as three tensors and without a bias.
    """

    def embed(self, g: GraphBuilder, products: Products, embeddings: Embeddings) -> str:
        """See `Tokens`."""
        self._offset = g.input(interface.TOKEN_OFFSET, TensorProto.INT32, ["B", "S"])
        self._starts = g.input(interface.CU_SEQLENS, TensorProto.INT32, ["B + 1"])

        def look_up(name: str, ids: str, table: nn.Embedding) -> str:
            ids = g.input(ids, TensorProto.INT32, ["T"])
            return g.op("Gather", [products.table(g, f"embeddings.{name}", table.weight), ids], axis=0)

        words = look_up("word", interface.INPUT_IDS, embeddings.word)
        rest = look_up("position", interface.POSITION_IDS, embeddings.position)
        if embeddings.token_type is not None:
            rest = g.op("Add", [rest, look_up("token_type", interface.TOKEN_TYPE_IDS, embeddings.token_type)])
        return self._skip_norm(g, products, [words, rest], "embeddings.norm", embeddings.norm)

    def attend(self, g: GraphBuilder, query: str, key: str, value: str, heads: int) -> str:
        """See `Tokens`."""
        inputs = [query, key, value, "", self._offset, self._starts]
        return g.op("PackedMultiHeadAttention", inputs, domain=FUSED, num_heads=heads)

    def residual_norm(
        self, g: GraphBuilder, products: Products, x: str, skip: str, name: str, bias: Tensor, layer: nn.LayerNorm
    ) -> str:
        """See `Tokens`."""
        return self._skip_norm(g, products, [x, skip], name, layer, products.vector(g, f"{name}.skip.bias", bias))

    @staticmethod
    def _skip_norm(g: GraphBuilder, products: Products, inputs: list[str], name: str, layer: nn.LayerNorm, bias: str = "") -> str:
        scale, shift = products.vector(g, f"{name}.weight", layer.weight), products.vector(g, f"{name}.bias", layer.bias)
        inputs = [*inputs, scale, shift, *([bias] if bias else [])]
        return g.op("SkipLayerNormalization", inputs, domain=FUSED, epsilon=layer.eps)
