"""Attention to contents and positions apart, as DeBERTa has it (He et al. 2021, section 3.1).

Shapes: B sequences, S tokens each, H hidden size, N attention heads, d = H / N, P the most
positions, K the embeddings of positions on each side of the middle (`RelativePositions.reach`).
In a graph, tokens are in C blocks of L, and each block has W distances.
"""

import math
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from onnx import TensorProto
from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig, RelativePositions
from cloze.export.blocks.layer import ACTIVATIONS, Layer, SelfAttention, split_heads
from cloze.export.blocks.relative_bias import Distances
from cloze.export.graph.builder import FUSED, GraphBuilder, layer_norm
from cloze.export.graph.trunk import TrunkGraph
from cloze.model_store import tensors

_BLOCK = 64
"""Most tokens of a block.

Milliseconds of processor time of the attention of one layer, 12 heads of 32, one thread of a
Sapphire Rapids that was busy otherwise, medians of 9 turns: 27.4 for 512 tokens as one block, 22.8
in blocks of 64, 23.0 of 128, 25.5 of 256.
"""


class DistanceBlocks(NamedTuple):
    """Names of values of a graph that describe its blocks, each with its distances to all tokens.

    A block has W = S + L columns; in its row a, token t is in column t + L - 1 - a.

    Attributes:
        tokens: int64 [C, L], the tokens of each block; the last block repeats the last token.
        before: int64 [C, W], the row of `PositionTable.table` of each distance, if the block's
            tokens are queries.
        after: the same, if the block's tokens are keys.
        begin: int64 [1], L - 1.
        end: int64 [1], L W - 1.
        shape: int64 [4], 0, 0, -1 and W - 1.
        sizes: int64 [2], S and S.
    """

    tokens: str
    before: str
    after: str
    begin: str
    end: str
    shape: str
    sizes: str


class PositionTable(Distances):
    """An embedding per bucket of distances, which each layer projects as it does contents."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        assert config.relative_positions is not None
        self.sizes, self.positions = config.relative_positions, config.max_positions
        self.heads = config.heads
        self.rows = nn.Embedding(2 * self.sizes.reach, config.hidden_size)
        self.norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if self.sizes.norm else None
        )

    def table(self) -> Tensor:
        """Return the embeddings [2 K, H] of the buckets."""
        return self.rows.weight if self.norm is None else self.norm(self.rows.weight)

    def forward(self, tokens: int) -> Tensor:
        """Return int [S, S], the row of `table` for each query and key of ``tokens`` tokens."""
        places = torch.arange(tokens, device=self.rows.weight.device)
        last = self.positions - 1
        distances = torch.arange(-last, last + 1, device=places.device)
        return bucket(distances, self.sizes)[places[:, None] - places[None, :] + last]

    def write(self, trunk: TrunkGraph) -> str:  # noqa: ARG002
        """Write nothing: each layer has products of its own; see `write_products`."""
        return ""

    @torch.no_grad()
    def write_products(
        self, trunk: TrunkGraph, operand: str, name: str, linear: nn.Linear, factor: float
    ) -> str:
        """Write the products of each token with the positions of all tokens: [B, N, S, S].

        The tokens are multiplied in blocks, since those of a block have fewer distances than all
        tokens have. The projected positions are constants.

        Args:
            operand: name of queries or keys [B, N, S, d].
            name: name of the projected positions.
            linear: the layer that projects positions.
            factor: of the products; negative if the operand has queries.
        """
        g = trunk.g
        blocks = trunk.once("distance_blocks", lambda: self._blocks(trunk))
        projected = split_heads((linear(self.table()) * abs(factor))[None], self.heads)[0]
        # Sums, so no fp16 numbers even if those of the matrices are.
        table = g.weight(name, projected, exact=True)
        rows = g.op("Gather", [table, blocks.before if factor < 0 else blocks.after], axis=1)
        tokens = g.op("Gather", [operand, blocks.tokens], axis=2)
        products = g.op("FusedMatMul", [tokens, rows], domain=FUSED, transB=1)
        return _write_moved(g, products, blocks)

    def _blocks(self, trunk: TrunkGraph) -> DistanceBlocks:
        """Write which tokens and distances are in which block; all layers share them."""
        g, farthest = trunk.g, self.positions + _BLOCK
        zero, one = g.number(0), g.number(1)
        length = g.op("Shape", [tensors.INPUT_IDS.name], start=1)
        # As many blocks as are needed, of nearly equal lengths: the last one has to be filled up.
        before_last = g.op("Sub", [length, g.ints(1)])
        count = g.op("Add", [g.op("Div", [before_last, g.ints(_BLOCK)]), g.ints(1)])
        size = g.op("Add", [g.op("Div", [before_last, count]), g.ints(1)])
        tokens, step = (g.op("Squeeze", [value]) for value in (length, size))
        firsts = g.op("Unsqueeze", [g.op("Range", [zero, tokens, step]), g.ints(1)])  # [C, 1]
        places = g.op("Add", [firsts, g.op("Range", [zero, step, one])])  # [C, L]
        columns = g.op("Range", [g.op("Sub", [one, step]), g.op("Add", [tokens, one]), one])
        apart = g.op("Sub", [columns, firsts])  # [C, W], from the block's token to the other one
        distances = torch.arange(-farthest, farthest + 1)
        buckets = g.weight("position_buckets", bucket(distances, self.sizes))
        before, after = (
            g.op("Gather", [buckets, g.op(kind, [g.number(farthest), apart])])
            for kind in ("Sub", "Add")
        )
        begin = g.op("Sub", [size, g.ints(1)])
        width = g.op("Add", [length, begin])
        return DistanceBlocks(
            tokens=g.op("Min", [places, g.op("Sub", [tokens, one])]),
            before=before,
            after=after,
            begin=begin,
            end=g.op("Add", [begin, g.op("Mul", [size, width])]),
            shape=g.op("Concat", [g.ints(0, 0, -1), width], axis=0),
            sizes=g.op("Concat", [length, length], axis=0),
        )


def _write_moved(g: GraphBuilder, products: str, blocks: DistanceBlocks) -> str:
    """Write products by distance [B, N, C, L, W] as products by token [B, N, S, S].

    The product of row a with token j is number L - 1 - a + j of the row. With the rows of a block
    one after another, it is number L - 1 + a (W - 1) + j: the first S of every W - 1.
    """
    flat = g.op("Reshape", [products, g.ints(0, 0, 0, -1)])
    flat = g.op("Slice", [flat, blocks.begin, blocks.end, g.ints(3)])
    rows = g.op("Reshape", [flat, blocks.shape])
    return g.op("Slice", [rows, g.ints(0, 0), blocks.sizes, g.ints(2, 3)])


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
        self, x: Tensor, mask: Tensor | None, bias: Tensor | None, values: Tensor | None = None
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
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
        context = F.scaled_dot_product_attention(query, key, value, scores, scale=self.scale)
        return self.output(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _write_context(
        self,
        trunk: TrunkGraph,
        name: str,
        operands: tuple[str, str, str],
        bias: str,  # noqa: ARG002
    ) -> str:
        """See `SelfAttention`.

        Measured beside it: rows by bucket and ``GatherElements``, and plain operators instead of
        the fused one (bench/results/engines-cpu.md).
        """
        g, (query, key, value) = trunk.g, operands
        bias_of_keys = trunk.linear_ops.vector(f"{name}.key.bias", self.key.bias)
        key = g.op("Add", [key, bias_of_keys])
        size = self.query.out_features // self.heads
        shape = g.ints(0, 0, self.heads, size)
        by_position = []
        for term, linear in self._projections().items():
            operand, sign = (query, -1) if term == "c2p" else (key, 1)
            operand = g.op("Transpose", [g.op("Reshape", [operand, shape])], perm=[0, 2, 1, 3])
            products = self.positions.write_products(
                trunk, operand, f"{name}.{term}", linear, sign * self.scale
            )
            if term == "p2c":
                products = g.op("Transpose", [products], perm=[0, 1, 3, 2])
            by_position.append(products)
        scores = reduce(lambda one, other: g.op("Add", [one, other]), by_position)
        return trunk.attend((query, key, value), self.heads, scores, self.scale)


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

    def forward(self, x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """See `Layer`."""
        output = super().forward(x, mask, bias)
        if mask is not None:
            x = x * mask[..., None]
        mixed = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        mixed = self.convolution_activation.forward(mixed)
        return self.convolution_norm(output + mixed)  # type: ignore[no-any-return]

    def write(self, trunk: TrunkGraph, name: str, x: str, bias: str = "") -> str:
        """See `Layer`. The convolution is fp32 in every precision."""
        g, layer, part = trunk.g, self.convolution, f"{name}.convolution"
        output = super().write(trunk, name, x, bias)
        if attended := trunk.attended():
            counts = g.op("Cast", [attended], to=TensorProto.FLOAT)
            x = g.op("Mul", [x, g.op("Unsqueeze", [counts, g.ints(2)])])
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
        total = g.op("Sum", [output, trunk.kept(mixed)])
        return layer_norm(g, total, f"{name}.convolution_norm", self.convolution_norm)
