"""Next-sentence prediction: whether the second text of a pair follows the first.

The result is the logits [2] of a pair: is next, is not next.

Source: Devlin et al. 2019, section 3.1, task 2.
"""

from typing import Final

from cloze.model_store.heads.head import Head
from cloze.model_store.heads.rows import per_sequence
from cloze.model_store.tensors import TensorSpec

PAIR_ROWS: Final = TensorSpec(
    "pair_rows", "int32", ("P",), "the rows of `hidden` that hold `[CLS]`"
)
PAIR_LOGITS: Final = TensorSpec(
    "pair_logits", "float32", ("P", 2), 'column 0 is "is next", column 1 is "is not next"'
)

HEAD: Final = Head(
    "next_sentence",
    "nsp",
    (PAIR_ROWS,),
    (PAIR_LOGITS,),
    *per_sequence(PAIR_ROWS, PAIR_LOGITS),
)
