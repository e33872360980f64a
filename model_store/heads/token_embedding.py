"""Token embedding: the last hidden state of every token of a sequence.

Source: Devlin et al. 2019, section 3 (the vector T_i of token i).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cloze.model_store.heads.head import Head, HeadRequest
from cloze.model_store.heads.rows import pack_token_rows, unpack_token_rows
from cloze.model_store.tensors import TensorSpec

HIDDEN_ROWS: Final = TensorSpec(
    "hidden_rows", "int32", ("G",), "the rows of `hidden` to return: all rows of a sequence"
)
TOKEN_EMBEDDINGS: Final = TensorSpec(
    "token_embeddings", "float32", ("G", "H"), "the last hidden state of each token"
)


@dataclass(frozen=True, slots=True)
class TokenEmbeddingRequest(HeadRequest):
    """Return the hidden state of every token of a sequence."""


@dataclass(frozen=True, slots=True)
class TokenEmbeddingResult:
    """The hidden states [S, H] float32 of one sequence, special tokens included."""

    embeddings: NDArray[np.float32]


HEAD: Final = Head(
    name="token_embedding",
    task="embed-all",
    inputs=(HIDDEN_ROWS,),
    outputs=(TOKEN_EMBEDDINGS,),
    request=TokenEmbeddingRequest,
    result=TokenEmbeddingResult,
    pack=pack_token_rows(HIDDEN_ROWS),
    unpack=unpack_token_rows(TOKEN_EMBEDDINGS, TokenEmbeddingResult),
    largest_request=lambda _: TokenEmbeddingRequest(),
    model_sizes=lambda sizes: {"H": sizes.hidden_size},
)
