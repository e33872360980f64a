"""The tensors that cross from a bundle's graph to the service: what one is, and those of the trunk.

The tensors of a head are in the head's module. `docs/tensors.md` is generated from both.
"""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

LayoutName = Literal["dense", "packed"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a graph.

    Attributes:
        name: the tensor's name in the graph.
        dtype: its numpy name.
        shape: sizes; a letter stands for a size that differs per batch or per model.
        meaning: for the documentation.
        layout: the only layout that has the tensor; None: both have it.
        packed_shape: the shape in the packed layout, where it differs.
    """

    name: str
    dtype: Literal["int32", "int64", "float32"]
    shape: tuple[str | int, ...]
    meaning: str
    layout: LayoutName | None = None
    packed_shape: tuple[str | int, ...] | None = None

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """The dtype as numpy has it."""
        return np.dtype(self.dtype)


INPUT_IDS: Final = TensorSpec(
    "input_ids",
    "int32",
    ("B", "S"),
    "vocabulary ids, `[CLS]` first",
    packed_shape=("T",),
)
TOKEN_TYPE_IDS: Final = TensorSpec(
    "token_type_ids",
    "int32",
    ("B", "S"),
    "0 for the first text of a pair, 1 for the second; absent for DistilBERT",
    packed_shape=("T",),
)
POSITION_IDS: Final = TensorSpec(
    "position_ids", "int32", ("T",), "0 for the first token of each sequence", "packed"
)
CU_SEQLENS: Final = TensorSpec(
    "cu_seqlens", "int32", ("B + 1",), "the row where each sequence starts, and T", "packed"
)
TOKEN_OFFSET: Final = TensorSpec(
    "token_offset",
    "int32",
    ("B", "S"),
    "the cells of a padded batch, S the longest length: first the cells of tokens, then the others",
    "packed",
)

TRUNK_INPUTS: Final = (INPUT_IDS, TOKEN_TYPE_IDS, POSITION_IDS, CU_SEQLENS, TOKEN_OFFSET)
