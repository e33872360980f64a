"""Next-sentence prediction: whether the second text of a pair follows the first.

Source: Devlin et al. 2019, section 3.1, task 2.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cloze.model_store.heads.head import Head, HeadRequest
from cloze.model_store.heads.rows import pack_first_rows, unpack_rows
from cloze.model_store.tensors import TensorSpec

PAIR_ROWS: Final = TensorSpec(
    "pair_rows", "int32", ("P",), "the rows of `hidden` that hold `[CLS]`"
)
PAIR_LOGITS: Final = TensorSpec(
    "pair_logits", "float32", ("P", 2), 'column 0 is "is next", column 1 is "is not next"'
)


@dataclass(frozen=True, slots=True)
class NextSentenceRequest(HeadRequest):
    """Score a pair."""


@dataclass(frozen=True, slots=True)
class NextSentenceResult:
    """The logits [2] float32 of one pair: is next, is not next."""

    logits: NDArray[np.float32]


HEAD: Final = Head(
    name="next_sentence",
    task="nsp",
    inputs=(PAIR_ROWS,),
    outputs=(PAIR_LOGITS,),
    request=NextSentenceRequest,
    result=NextSentenceResult,
    pack=pack_first_rows(PAIR_ROWS),
    unpack=unpack_rows(PAIR_LOGITS, NextSentenceResult),
    largest_request=lambda _: NextSentenceRequest(),
)
