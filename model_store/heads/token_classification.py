"""Token classification: one logit per label for every token of a sequence.

Source: Devlin et al. 2019, section 5.3 (named-entity recognition).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cloze.model_store.heads.head import Frozen, Head, HeadRequest, ModelSizes
from cloze.model_store.heads.rows import pack_token_rows, unpack_token_rows
from cloze.model_store.tensors import TensorSpec

TOKEN_ROWS: Final = TensorSpec(
    "token_rows", "int32", ("R",), "the rows of `hidden` to classify: all rows of a sequence"
)
TOKEN_LOGITS: Final = TensorSpec(
    "token_logits", "float32", ("R", "L"), "one logit for each of the model's L labels"
)


class TokenLabels(Frozen):
    """The head's section in a manifest.

    Attributes:
        labels: label names in the order of the logits, for example ``O``, ``B-PER``, ``I-PER``.
    """

    labels: tuple[str, ...] = Field(min_length=1)


def _model_sizes(sizes: ModelSizes) -> dict[str, int]:
    options = sizes.options[HEAD.name]
    assert isinstance(options, TokenLabels)
    return {"L": len(options.labels)}


@dataclass(frozen=True, slots=True)
class TokenClassificationRequest(HeadRequest):
    """Classify every token of a sequence."""


@dataclass(frozen=True, slots=True)
class TokenClassificationResult:
    """The logits [S, L] float32 of one sequence."""

    logits: NDArray[np.float32]


HEAD: Final = Head(
    name="token_classification",
    task="token-classification",
    inputs=(TOKEN_ROWS,),
    outputs=(TOKEN_LOGITS,),
    request=TokenClassificationRequest,
    result=TokenClassificationResult,
    pack=pack_token_rows(TOKEN_ROWS),
    unpack=unpack_token_rows(TOKEN_LOGITS, TokenClassificationResult),
    largest_request=lambda _: TokenClassificationRequest(),
    options=TokenLabels,
    model_sizes=_model_sizes,
)
