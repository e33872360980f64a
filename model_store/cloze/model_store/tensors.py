"""The tensors of a bundle's graph: how one is described, and the inputs and tables of the trunk.

The tensors of a head are in the head's module. `scripts/tensor-reference` generates
`docs/tensors.md` from both.
"""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

LayoutName = Literal["dense", "packed"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a graph.

    Attributes:
        shape: the tensor's sizes; a letter stands for a size that differs per batch or per model.
            A letter has one meaning in all tensors, which `docs/tensors.md` lists: onnxruntime
            takes two sizes of one graph with the same letter for equal when it shares buffers.
        layout: the only layout that has the tensor; None: both layouts have the tensor.
        packed_shape: the shape in the packed layout, where that shape differs.
    """

    name: str
    dtype: Literal["int32", "int64", "float32"]
    shape: tuple[str | int, ...]
    meaning: str
    layout: LayoutName | None = None
    packed_shape: tuple[str | int, ...] | None = None

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """The tensor's numpy dtype."""
        return np.dtype(self.dtype)

    def is_in(self, layout: str) -> bool:
        """Return whether graphs of a layout, "dense" or "packed", have the tensor."""
        return self.layout is None or self.layout == layout

    def shape_in(self, layout: str) -> tuple[str | int, ...]:
        """Return the tensor's shape in a layout, "dense" or "packed"."""
        if layout == "packed" and self.packed_shape is not None:
            return self.packed_shape
        return self.shape


INPUT_IDS: Final = TensorSpec(
    "input_ids",
    "int32",
    ("B", "S"),
    "vocabulary ids; each sequence starts with `[CLS]`",
    packed_shape=("T",),
)
TOKEN_TYPE_IDS: Final = TensorSpec(
    "token_type_ids",
    "int32",
    ("B", "S"),
    "text of a pair, 0 or 1; absent without token types",
    packed_shape=("T",),
)
POSITION_IDS: Final = TensorSpec(
    "position_ids",
    "int32",
    ("T",),
    "position of each token in its sequence, from 0",
    "packed",
)
CU_SEQLENS: Final = TensorSpec(
    "cu_seqlens",
    "int32",
    ("B + 1",),
    "the row at which each sequence starts, then T",
    "packed",
)
TOKEN_OFFSET: Final = TensorSpec(
    "token_offset",
    "int32",
    ("B", "S"),
    "the padded batch's cells: tokens first, then padding",
    "packed",
)

WORD_TABLE: Final = "embeddings.word"
"""The weight [V, H] with one row per id of the vocabulary."""

POSITION_TABLE: Final = "embeddings.position"
"""The weight with one row of H numbers per position."""

TOKEN_TYPE_TABLE: Final = "embeddings.token_type"
"""The weight with one row of H numbers per token type; absent without token types."""

TABLES: Final = (WORD_TABLE, POSITION_TABLE, TOKEN_TYPE_TABLE)
"""The tables that a trunk may look up."""

TRUNK_INPUTS: Final = (INPUT_IDS, TOKEN_TYPE_IDS, POSITION_IDS, CU_SEQLENS, TOKEN_OFFSET)
"""The inputs of the encoder, which every graph has."""
