"""Lexical weights: one weight per token of a text, for sparse vectors of the text's own tokens.

The result is the weights [S, 1] of a sequence, 0 or larger. The weight of an id of the vocabulary
is the largest weight of its tokens.

Source: Chen et al. 2024, "BGE M3-Embedding", section 3.2.
"""

from collections.abc import Sequence
from typing import Final

from pydantic import Field

from cloze.model_store.heads.head import Frozen, Head
from cloze.model_store.heads.rows import per_token
from cloze.model_store.limits import MAX_VOCABULARY
from cloze.model_store.tensors import TensorSpec

LEXICAL_ROWS: Final = TensorSpec(
    "lexical_rows", "int32", ("Q",), "the rows of `hidden` to weigh: all rows of a sequence"
)
LEXICAL_WEIGHTS: Final = TensorSpec(
    "lexical_weights", "float32", ("Q", 1), "the weight of each token, 0 or larger"
)


class LexicalOptions(Frozen):
    """The ids without a weight, which are special tokens."""

    skipped_ids: tuple[int, ...] = Field((), max_length=MAX_VOCABULARY)

    @property
    def token_ids(self) -> Sequence[int]:
        """See `Frozen`."""
        return self.skipped_ids


HEAD: Final = Head(
    "lexical",
    "lexical",
    (LEXICAL_ROWS,),
    (LEXICAL_WEIGHTS,),
    *per_token(LEXICAL_ROWS, LEXICAL_WEIGHTS),
    per_token=True,
    options=LexicalOptions,
)
