"""Dense and packed batches: the row of ``hidden [T, H]`` that belongs to each token.

The trunk of a graph computes ``hidden [T, H]``, one row per real token. In the dense layout all
sequences of a batch have one length S, so ``T = B * S``, and token ``i`` of sequence ``b`` has row
``b * S + i``. In the packed layout the sequences have any lengths and follow each other: sequence
``b`` has the rows ``starts[b]`` to ``starts[b + 1] - 1``.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloze.model_store import tensors

Int32 = NDArray[np.int32]
Feeds = dict[str, NDArray[Any]]
"""Graph inputs by tensor name."""


class Layout(StrEnum):
    """How the tokens of a batch are arranged in memory."""

    DENSE = "dense"
    """``[B, S]``, all sequences of one length: no padding, hence no attention mask. For a CPU."""

    PACKED = "packed"
    """``[T]``, sequences of any lengths one after the other: no padding either. For CUDA."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The rows of the tokens of one batch.

    Attributes:
        layout: the graph's layout.
        lengths: int32 [B], tokens of each sequence, each at least 1.
        starts: int32 [B + 1], the row at which each sequence starts, then T.
    """

    layout: Layout
    lengths: Int32
    starts: Int32

    def feeds(self) -> Feeds:
        """Return the inputs that describe a packed placement; the dense layout has none."""
        longest = int(self.lengths.max())
        real = np.arange(longest) < self.lengths[:, None]  # [B, S]
        cells = np.arange(real.size, dtype=np.int32)
        positions = np.arange(self.starts[-1], dtype=np.int32)
        return {
            tensors.POSITION_IDS.name: positions - np.repeat(self.starts[:-1], self.lengths),
            tensors.CU_SEQLENS.name: self.starts,
            tensors.TOKEN_OFFSET.name: np.concatenate(
                [cells[real.ravel()], cells[~real.ravel()]]
            ).reshape(real.shape),
        }
