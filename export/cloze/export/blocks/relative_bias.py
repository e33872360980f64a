"""A bias of attention by the distance of two tokens (Raffel et al. 2020, section 2.1).

Shapes: S tokens, N attention heads, B buckets, P the most positions.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from cloze.export.graph.trunk import TrunkGraph
from cloze.model_store import tensors

BUCKETS = 32
"""Half of the buckets are for keys before the query, half for keys after it."""

_FARTHEST = 128
"""The distance from which on all distances share the last bucket."""

_RUN = 16
"""Neighbouring keys whose biases a graph copies at once.

Milliseconds of processor time of the bias of 12 heads and 512 tokens, one thread: 10.5 key by key,
2.1 in runs of 16, 2.0 in runs of 32. One slice of a stored [N, P, P] takes 1.0, and 12 MB more.
"""


class Distances(nn.Module, ABC):
    """What all layers share about the distances of tokens."""

    @abstractmethod
    def forward(self, tokens: int) -> Tensor:
        """Return what the layers' attention takes for sequences of ``tokens`` tokens."""

    @abstractmethod
    def write(self, trunk: TrunkGraph) -> str:
        """Write the same, and return its name."""


class RelativeBias(Distances):
    """One number per head and bucket of distances, added to the scores of every layer."""

    def __init__(self, heads: int, positions: int) -> None:
        super().__init__()
        self.buckets = nn.Embedding(BUCKETS, heads)
        self.positions = positions

    def forward(self, tokens: int) -> Tensor:
        """Return the bias [1, N, S, S] of sequences of ``tokens`` tokens."""
        places = torch.arange(tokens, device=self.buckets.weight.device)
        bias: Tensor = self.buckets(bucket(places[None, :] - places[:, None]))  # [S, S, N]
        return bias.permute(2, 0, 1)[None]

    def write(self, trunk: TrunkGraph) -> str:
        """Write the bias [1, N, S, S] of the dense layout, from the runs of all distances."""
        g, last = trunk.g, self.positions - 1
        runs = torch.arange(-last, last + 1)[:, None] + torch.arange(_RUN)
        table = self.buckets.weight[bucket(runs)].permute(2, 0, 1)[None]  # [1, N, 2 P - 1, _RUN]
        length = g.op("Shape", [tensors.INPUT_IDS.name], start=1)
        zero, tokens = g.number(0), g.op("Squeeze", [length])
        rows = g.op("Unsqueeze", [g.op("Range", [zero, tokens, g.number(1)]), g.ints(1)])
        firsts = g.op("Range", [zero, tokens, g.number(_RUN)])  # of each run, the first key
        indices = g.op("Add", [g.op("Sub", [firsts, rows]), g.number(last)])  # key minus query
        vector = trunk.linear_ops.vector("relative_bias", table.contiguous())
        copied = g.op("Gather", [vector, indices], axis=2)  # [1, N, S, runs, _RUN]
        joined = g.op("Reshape", [copied, g.ints(0, 0, 0, -1)])
        return g.op("Slice", [joined, g.ints(0), length, g.ints(3)])


def bucket(distance: Tensor) -> Tensor:
    """Return the bucket of each distance, key minus query: int, of any shape.

    Near distances have a bucket each, farther ones share buckets of growing width.
    """
    half, near = BUCKETS // 2, BUCKETS // 4
    size = distance.abs()
    scaled = torch.log(size.clamp_min(1).double() / near) / math.log(_FARTHEST / near)
    far = (near + (scaled * (half - near)).long()).clamp_max(half - 1)
    return half * (distance > 0).long() + torch.where(size < near, size, far)
