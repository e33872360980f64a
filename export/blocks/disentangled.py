"""Attention to contents and positions apart, as DeBERTa has it (He et al. 2021, section 3.1).

Shapes: B sequences, S tokens each, H hidden size, N attention heads, d = H / N, P the most
positions, K the embeddings of positions on each side of the middle (`RelativePositions.reach`).
"""

import math

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig, RelativePositions
from cloze.export.blocks.encoder import Embeddings
from cloze.export.blocks.layer import ACTIVATIONS, Layer, SelfAttention, attend, split_heads
from cloze.export.blocks.relative_bias import Distances
from cloze.export.graph.builder import FUSED, GraphBuilder, layer_norm
from cloze.export.graph.trunk import TrunkGraph
from cloze.model_store import tensors


class PositionTable(Distances):
    """An embedding per bucket of distances, which each layer projects as it does contents.

    Args:
        config: the sizes; its ``relative_positions`` are given.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        assert config.relative_positions is not None
        self.sizes, self.positions = config.relative_positions, config.max_positions
        self.heads = config.heads
        self.rows = nn.Embedding(2 * self.sizes.reach, config.hidden_size)
        self.norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if self.sizes.norm else None
        )
        self.dropout = nn.Dropout(config.dropout)

    def table(self) -> Tensor:
        """Return the embeddings [2 K, H] of the buckets."""
        rows = self.rows.weight if self.norm is None else self.norm(self.rows.weight)
        return self.dropout(rows)  # type: ignore[no-any-return]

    def forward(self, tokens: int) -> Tensor:
        """Return int [S, S], the row of `table` for each query and key of ``tokens`` tokens."""
        places = torch.arange(tokens, device=self.rows.weight.device)
        last = self.positions - 1
        distances = torch.arange(-last, last + 1, device=places.device)
        return bucket(distances, self.sizes)[places[:, None] - places[None, :] + last]

    def write(self, trunk: TrunkGraph) -> str:  # noqa: ARG002
        """Write nothing: each layer has products of its own; see `write_rows`."""
        return ""

    @torch.no_grad()
    def write_rows(self, trunk: TrunkGraph, name: str, linear: nn.Linear, factor: float) -> str:
        """Write rows of ``|factor| * linear(table)`` [N, 2 S, d] by distance, from 1 - S to S.

        The products are constants. The runtime finds that the numbers of rows are the same in every
        layer, and computes them once.

        Args:
            trunk: the graph.
            name: name of the products.
            linear: the layer that projects positions.
            factor: negative for distances of key minus query, positive for query minus key.
        """
        g = trunk.g
        products = split_heads((linear(self.table()) * abs(factor))[None], self.heads)[0]
        # Sums, so no fp16 numbers even if those of the matrices are.
        table = g.weight(name, products, exact=True)
        distances = torch.arange(1 - self.positions, self.positions + 1)
        rows, side = (-distances, "before") if factor < 0 else (distances, "after")
        buckets = g.weight(f"position_buckets_{side}", bucket(rows, self.sizes))
        length = _length(g)
        most = g.weight("positions", np.array([self.positions], np.int64))
        span = [g.op(kind, [most, length]) for kind in ("Sub", "Add")]
        return g.op("Gather", [table, g.op("Slice", [buckets, *span])], axis=1)


def _length(g: GraphBuilder) -> str:
    return g.op("Shape", [tensors.INPUT_IDS.name], start=1)


def _write_moved(g: GraphBuilder, products: str) -> str:
    """Write products by distance [B, N, S, 2 S], from 1 - S to S, as [B, N, S, S] by place.

    Number j of row i is number S - 1 - i + j of the same row. With all rows one after another,
    these numbers are S - 1 + i (2 S - 1) + j, hence the first S of every 2 S - 1.
    """
    one, two, length = _axis(g, 1), _axis(g, 2), _length(g)
    flat = g.op("Reshape", [products, g.weight("flat_rows", np.array([0, 0, -1], np.int64))])
    begin = g.op("Sub", [length, one])
    width = g.op("Add", [length, begin])
    end = g.op("Add", [begin, g.op("Mul", [length, width])])
    flat = g.op("Slice", [flat, begin, end, two])
    same = g.weight("same_sizes", np.array([0, 0], np.int64))
    square = g.op("Reshape", [flat, g.op("Concat", [same, length, width], axis=0)])
    return g.op("Slice", [square, _axis(g, 0), length, _axis(g, 3)])


def _axis(g: GraphBuilder, number: int) -> str:
    return g.weight(f"axis_{number}", np.array([number], np.int64))


def bucket(distance: Tensor, sizes: RelativePositions) -> Tensor:
    """Return the bucket of each distance, query minus key: int from 0 to 2 K - 1, of any shape.

    Near distances have a bucket each, farther ones share buckets of growing width.
    """
    reach, near = sizes.reach, sizes.buckets // 2
    if near:
        size = distance.abs()
        scaled = torch.log(size.clamp_min(1).double() / near)
        scaled = scaled / math.log((sizes.distances - 1) / near) * (near - 1)
        far = (near + scaled.ceil().long()) * distance.sign()
        distance = torch.where(size <= near, distance, far)
    return (distance + reach).clamp(0, 2 * reach - 1)


class DisentangledAttention(SelfAttention):
    """Attention whose scores are the sum of products of contents and of positions.

    The score of query i and key j is the sum of three products, divided by the root of 3 d:

    - q_i . k_j, of their contents;
    - q_i . K(i - j), where K are the position embeddings as keys ("c2p");
    - k_j . Q(i - j), where Q are the position embeddings as queries ("p2c").

    K and Q are constants of a layer, computed at export. In the graph, keys have their bias: it
    would cancel in the softmax but for the third product, in which it meets another Q for each i.

    Args:
        positions: the embeddings of positions, which the encoder owns.
    """

    def __init__(self, config: EncoderConfig, positions: PositionTable) -> None:
        super().__init__(config)
        size, terms = config.hidden_size, positions.sizes.terms
        self._positions = (positions,)  # in a tuple, so that it is no parameter of each layer
        self.scale = (size / config.heads * (1 + len(terms))) ** -0.5
        own = not positions.sizes.share_projections
        self.position_key = nn.Linear(size, size) if own and "c2p" in terms else None
        self.position_query = nn.Linear(size, size) if own and "p2c" in terms else None

    @property
    def positions(self) -> PositionTable:
        """The embeddings of positions."""
        return self._positions[0]

    def _projections(self) -> dict[str, nn.Linear]:
        """Return the layers that project positions, by the product that they are for."""
        layers = {
            "c2p": self.key if self.position_key is None else self.position_key,
            "p2c": self.query if self.position_query is None else self.position_query,
        }
        return {term: one for term, one in layers.items() if term in self.positions.sizes.terms}

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        bias: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """See `SelfAttention`; ``bias`` is what `PositionTable` returns."""
        assert bias is not None
        assert values is None
        query, key, value = (
            split_heads(linear(x), self.heads) for linear in (self.query, self.key, self.value)
        )
        rows = bias.expand(*query.shape[:2], *bias.shape)  # [B, N, S, S]
        table, scores = self.positions.table(), query.new_zeros(())
        for term, linear in self._projections().items():
            projected = split_heads(linear(table)[None], self.heads)  # [1, N, 2 K, d]
            if term == "c2p":
                products = torch.gather(query @ projected.transpose(2, 3), 3, rows)
            else:
                products = torch.gather(projected @ key.transpose(2, 3), 2, rows)
            scores = scores + products * self.scale
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask[:, None, None, :], -torch.inf)
        context = attend((query, key, value), scores, self.scale)
        return self.output(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _write_context(
        self,
        trunk: TrunkGraph,
        name: str,
        operands: tuple[str, str, str],
        bias: str,  # noqa: ARG002
    ) -> str:
        """See `SelfAttention`.

        Measured beside it: rows by bucket and ``GatherElements``, and the fused
        ``MultiHeadAttention`` with the sum as its bias (bench/results/deberta-cpu.md).
        """
        g, (query, key, value) = trunk.g, operands
        bias_of_keys = trunk.linear_ops.vector(f"{name}.key.bias", self.key.bias)
        key = g.op("Add", [key, bias_of_keys])
        size = self.query.out_features // self.heads
        shape = g.weight("head_shape", np.array([0, 0, self.heads, size], np.int64))
        query, key, value = (
            g.op("Transpose", [g.op("Reshape", [one, shape])], perm=[0, 2, 1, 3])
            for one in (query, key, value)
        )
        scores = g.op("FusedMatMul", [query, key], domain=FUSED, transB=1, alpha=self.scale)
        for term, linear in self._projections().items():
            operand, sign = (query, -1) if term == "c2p" else (key, 1)
            rows = self.positions.write_rows(trunk, f"{name}.{term}", linear, sign * self.scale)
            products = g.op("FusedMatMul", [operand, rows], domain=FUSED, transB=1)
            products = _write_moved(g, products)
            if term == "p2c":
                products = g.op("Transpose", [products], perm=[0, 1, 3, 2])
            scores = g.op("Add", [scores, products])
        if attended := trunk.attended():
            axes = g.weight("axes_1_2", np.array([1, 2], np.int64))
            nothing = g.weight("minus_infinity", np.array(-np.inf, np.float32))
            scores = g.op("Where", [g.op("Unsqueeze", [attended, axes]), scores, nothing])
        context = g.op("MatMul", [g.op("Softmax", [scores], axis=-1), value])
        joined = g.weight("joined_heads", np.array([0, 0, -1], np.int64))
        return g.op("Reshape", [g.op("Transpose", [context], perm=[0, 2, 1, 3]), joined])


class DisentangledLayer(Layer):
    """A layer with `DisentangledAttention`."""

    def __init__(self, config: EncoderConfig, positions: PositionTable) -> None:
        super().__init__(config)
        self.attention = DisentangledAttention(config, positions)


class ConvolvedLayer(DisentangledLayer):
    """The first layer of a large DeBERTa-v2: a convolution of its input is added to its output.

    The convolution is over neighbouring tokens; beyond the text there are zeros.
    """

    def __init__(self, config: EncoderConfig, positions: PositionTable) -> None:
        super().__init__(config, positions)
        assert config.convolution is not None
        sizes, size = config.convolution, config.hidden_size
        self.convolution = nn.Conv1d(
            size, size, sizes.kernel, padding=sizes.kernel // 2, groups=sizes.groups
        )
        self.convolution_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.convolution_activation = ACTIVATIONS[sizes.activation]

    def forward(
        self, x: Tensor, attention_mask: Tensor | None, bias: Tensor | None = None
    ) -> Tensor:
        """See `Layer`."""
        output = super().forward(x, attention_mask, bias)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        mixed = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        mixed = self.convolution_activation.forward(self.dropout(mixed))
        return self.convolution_norm(output + mixed)  # type: ignore[no-any-return]

    def write(self, trunk: TrunkGraph, name: str, x: str, bias: str = "") -> str:
        """See `Layer`. The convolution is fp32 in every precision."""
        g, layer, part = trunk.g, self.convolution, f"{name}.convolution"
        output = super().write(trunk, name, x, bias)
        if attended := trunk.attended():
            counts = g.op("Cast", [attended], to=TensorProto.FLOAT)
            x = g.op("Mul", [x, g.op("Unsqueeze", [counts, _axis(g, 2)])])
        channels = g.op("Transpose", [x], perm=[0, 2, 1])  # [B, H, S]
        padding = layer.kernel_size[0] // 2
        mixed = g.op(
            "Conv",
            [channels, g.weight(f"{part}.weight", layer.weight)],
            pads=[padding, padding],
            group=layer.groups,
        )
        mixed = g.op("Transpose", [mixed], perm=[0, 2, 1])
        assert layer.bias is not None
        bias = g.weight(f"{part}.bias", layer.bias)
        mixed = self.convolution_activation.write(g, mixed, bias)
        total = g.op("Sum", [output, mixed])
        return layer_norm(g, total, f"{name}.convolution_norm", self.convolution_norm)


class ProjectedEmbeddings(Embeddings):
    """Embeddings whose sum is projected before it is normalised, without a bias."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        narrow = config.embedding_size
        self.projection = nn.Linear(narrow, size, bias=False) if narrow else None

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor | None,
        first_positions: Tensor | None = None,
        attention_mask: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """See `Embeddings`."""
        x = self._sum(input_ids, token_type_ids, first_positions)
        x = x if self.projection is None else self.projection(x)
        return self.dropout(self.norm(x))  # type: ignore[no-any-return]

    def write(self, trunk: TrunkGraph) -> str:
        """See `Embeddings`."""
        terms = self._write_terms(trunk)
        if self.projection is not None:
            ops, name = trunk.linear_ops, "embeddings.projection"
            total = trunk.g.op("Sum", terms)
            terms = [ops.matmul(ops.prepare_input(total, name), name, self.projection)]
        return trunk.norm_of_sum(terms, "embeddings.norm", self.norm)
