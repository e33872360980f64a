"""Token embedding: the last hidden state of every token of a sequence.

The result is the hidden states [S, H] of a sequence, special tokens included.

Source: Devlin et al. 2019, section 3 (the vector T_i of token i).
"""

from typing import Final

from cloze.model_store.heads.head import Head
from cloze.model_store.heads.rows import per_token
from cloze.model_store.tensors import TensorSpec

HIDDEN_ROWS: Final = TensorSpec(
    "hidden_rows", "int32", ("G",), "the rows of `hidden` to return: all rows of a sequence"
)
TOKEN_EMBEDDINGS: Final = TensorSpec(
    "token_embeddings", "float32", ("G", "H"), "the last hidden state of each token"
)

HEAD: Final = Head(
    "token_embedding",
    "embed-all",
    (HIDDEN_ROWS,),
    (TOKEN_EMBEDDINGS,),
    *per_token(HIDDEN_ROWS, TOKEN_EMBEDDINGS),
    per_token=True,
    model_sizes=lambda sizes: {"H": sizes.hidden_size},
)
