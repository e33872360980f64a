"""A bias of attention by the distance of two tokens (Raffel et al. 2020, section 2.1).

Shapes: S tokens, N attention heads, B buckets, P the most positions.
"""

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor, nn

from cloze.export.graph.trunk import TrunkGraph
from cloze.model_store import tensors

BUCKETS = 32
"""Half of the buckets are for keys before the query, half for keys after it."""

_FARTHEST = 128
"""The distance from which on all distances share the last bucket."""


class Distances(nn.Module, ABC):
    """What all layers share about the distances of tokens."""

    @abstractmethod
    def forward(self, tokens: int) -> Tensor:
        """Return what the layers' attention takes for sequences of ``tokens`` tokens."""

    @abstractmethod
    def write(self, trunk: TrunkGraph) -> str:
        """Write the same, and return its name."""


class RelativeBias(Distances):
    """One number per head and bucket of distances, added to the scores of every layer.

    Args:
        heads: number of attention heads.
        positions: the longest sequence.
    """

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
        """Write the bias [1, N, S, S] of the dense layout, from a table of all distances."""
        g, last = trunk.g, self.positions - 1
        distances = torch.arange(-last, last + 1)
        table = self.buckets.weight[bucket(distances)].t()  # [N, 2 P - 1]
        length = g.op("Squeeze", [g.op("Shape", [tensors.INPUT_IDS.name], start=1)])
        zero, one, middle = (
            g.weight(f"distance_{number}", np.array(number, np.int64)) for number in (0, 1, last)
        )
        places = g.op("Range", [zero, length, one])
        rows = g.op("Unsqueeze", [places, g.weight("axis_1", np.array([1], np.int64))])
        indices = g.op("Add", [g.op("Sub", [places, rows]), middle])  # [S, S]: key minus query
        bias = g.op(
            "Gather",
            [trunk.linear_ops.vector("relative_bias", table.contiguous()), indices],
            axis=1,
        )
        return g.op("Unsqueeze", [bias, g.weight("axis_0", np.array([0], np.int64))])


def bucket(distance: Tensor) -> Tensor:
    """Return the bucket of each distance, key minus query: int, of any shape.

    Near distances have a bucket each, farther ones share buckets of growing width.
    """
    half, near = BUCKETS // 2, BUCKETS // 4
    size = distance.abs()
    scaled = torch.log(size.clamp_min(1).double() / near) / math.log(_FARTHEST / near)
    far = (near + (scaled * (half - near)).long()).clamp_max(half - 1)
    return half * (distance > 0).long() + torch.where(size < near, size, far)
