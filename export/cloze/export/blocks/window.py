"""Local attention: each token attends to the tokens within a distance (Beltagy et al. 2020, 3.1).

The graph of a long sequence computes blocks of queries with the keys around them, so that time and
memory grow with the length and not with its square. A short sequence is one block.
Shapes: B sequences, S tokens each, H hidden size, N attention heads, d = H / N, C blocks of L
queries and K keys.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cloze.export.graph.builder import GraphBuilder
from cloze.export.graph.trunk import TrunkGraph
from cloze.model_store import tensors

_ONE_BLOCK = 4
"""Sequences up to this many distances are one block.

Milliseconds of the attention of one layer, as one block and in blocks (384 numbers, 6 heads,
distance 64, one thread): 1.11 and 1.28 for 192 tokens, 1.96 and 1.90 for 256, 3.97 and 2.55 for
384.
"""

_LEAST = 50.0
"""The least score of a key is that of the row's best key minus this number.

A key outside the window has the weight ``exp(-50)`` or less, 2e-22, which fp32 sums do not notice.
Without a least score, the runtime gives such keys weights below 1e-38, with which processors count
slowly: 4.9 ms instead of 3.2 per layer of 512 tokens, 12 heads of 32 (Sapphire Rapids, one thread).
"""


class Blocks(NamedTuple):
    """Names of values of a graph that describe its blocks.

    Attributes:
        query_rows: int64 [C, L], the token of each query; the last block repeats the last token.
        key_rows: int64 [C, K], the token of each key.
        mask: float32 [C, L, K], or [B, 1, C, L, K] if some tokens are no keys. 0 for keys within
            the distance, else minus infinity.
        tokens: int64 [1], S.
    """

    query_rows: str
    key_rows: str
    mask: str
    tokens: str


@dataclass(frozen=True, slots=True)
class Window:
    """The keys to which a token attends: those at most ``distance`` tokens before or after it."""

    distance: int

    def mask(self, tokens: int, device: torch.device) -> Tensor | None:
        """Return bool [S, S], True for keys within the distance; None: all of them are."""
        if tokens <= self.distance + 1:
            return None
        places = torch.arange(tokens, device=device)
        return (places[:, None] - places[None, :]).abs() <= self.distance

    def changes(self) -> tuple[int, int]:
        """Return the first lengths with a mask of distances, and with several blocks."""
        return self.distance + 2, _ONE_BLOCK * self.distance + 1

    def write(
        self, trunk: TrunkGraph, operands: tuple[str, str, str], heads: int, width: int
    ) -> str:
        """Write the attention of each sequence to itself, in the dense layout: [B, S, H]."""
        g, blocks = trunk.g, trunk.once(f"window.{self.distance}", lambda: self._blocks(trunk))

        def gathered(x: str, rows: str) -> str:  # [B, S, H] -> [B, N, C, L or K, d]
            by_head = g.op("Reshape", [x, g.ints(0, 0, heads, -1)])
            turned = g.op("Transpose", [by_head], perm=[0, 2, 1, 3])
            return g.op("Gather", [turned, rows], axis=2)

        query, key, value = operands
        queries = gathered(g.op("Mul", [query, g.number(width**-0.5)]), blocks.query_rows)
        keys, values = (gathered(x, blocks.key_rows) for x in (key, value))
        scores = g.op("MatMul", [queries, g.op("Transpose", [keys], perm=[0, 1, 2, 4, 3])])
        scores = g.op("Add", [scores, blocks.mask])
        weights = g.op("Softmax", [_write_raised(g, scores)], axis=-1)
        if trunk.keys:  # as in torch, a token without keys attends to nothing
            weights = g.op("Where", [g.op("IsNaN", [weights]), g.number(0.0), weights])
        context = g.op("MatMul", [weights, values])  # [B, N, C, L, d]
        by_token = g.op("Transpose", [context], perm=[0, 2, 3, 1, 4])
        batch, size = (g.op("Shape", [query], start=axis, end=axis + 1) for axis in (0, 2))
        rows = g.op("Reshape", [by_token, g.op("Concat", [batch, g.ints(-1), size], axis=0)])
        return g.op("Slice", [rows, g.ints(0), blocks.tokens, g.ints(1)])

    def _blocks(self, trunk: TrunkGraph) -> Blocks:
        """Write which tokens are in which block; all layers share them."""
        g = trunk.g
        zero, one, distance = (g.number(value) for value in (0, 1, self.distance))
        shape = g.op("Shape", [tensors.INPUT_IDS.name], start=1)
        tokens = g.op("Squeeze", [shape])
        is_short = g.op("LessOrEqual", [tokens, g.number(_ONE_BLOCK * self.distance)])
        length = g.op("Where", [is_short, tokens, distance])
        margin = g.op("Where", [is_short, zero, distance])
        count = g.op("Div", [g.op("Sub", [g.op("Add", [tokens, length]), one]), length])
        firsts = g.op("Mul", [g.op("Range", [zero, count, one]), length])
        firsts = g.op("Unsqueeze", [firsts, g.ints(1)])  # [C, 1]
        queries = g.op("Add", [firsts, g.op("Range", [zero, length, one])])  # [C, L]
        ends = g.op("Neg", [margin]), g.op("Add", [length, margin])
        keys = g.op("Add", [firsts, g.op("Range", [*ends, one])])  # [C, K]
        last = g.op("Sub", [tokens, one])
        key_rows = g.op("Max", [g.op("Min", [keys, last]), zero])
        is_token = g.op("Unsqueeze", [g.op("Equal", [keys, key_rows]), g.ints(1)])
        columns = g.op("Unsqueeze", [queries, g.ints(2)])
        apart = g.op("Abs", [g.op("Sub", [columns, g.op("Unsqueeze", [keys, g.ints(1)])])])
        is_near = g.op("And", [g.op("LessOrEqual", [apart, distance]), is_token])
        if attended := trunk.attended():
            is_key = g.op("Gather", [attended, key_rows], axis=1)  # [B, C, K]
            is_near = g.op("And", [is_near, g.op("Unsqueeze", [is_key, g.ints(1, 3)])])
        mask = g.op("Where", [is_near, g.number(0.0), g.number(-math.inf)])
        return Blocks(g.op("Min", [queries, last]), key_rows, mask, shape)


def _write_raised(g: GraphBuilder, scores: str) -> str:
    """Write scores [..., K] that are at most `_LEAST` below the largest of their row."""
    largest = g.op("ReduceMax", [scores, g.ints(-1)], keepdims=1)
    return g.op("Max", [scores, g.op("Sub", [largest, g.number(_LEAST)])])
