"""Sequence classification: one logit per label for a text or a pair of texts.

Source: Devlin et al. 2019, section 4.1.
"""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from cloze.model_store.heads.head import Frozen, Head, HeadRequest, ModelSizes
from cloze.model_store.heads.rows import pack_first_rows, unpack_rows
from cloze.model_store.tensors import TensorSpec

CLASS_ROWS: Final = TensorSpec(
    "class_rows", "int32", ("C",), "the rows of `hidden` that hold `[CLS]`"
)
CLASS_LOGITS: Final = TensorSpec(
    "class_logits", "float32", ("C", "L"), "one logit for each of the model's L labels"
)

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


class SequenceLabels(Frozen):
    """The head's section in a manifest.

    Attributes:
        labels: label names in the order of the logits.
        problem_type: how logits become scores, by the name in transformers' ``config.json``.
    """

    labels: tuple[str, ...] = Field(min_length=1)
    problem_type: ProblemType


def _model_sizes(sizes: ModelSizes) -> dict[str, int]:
    options = sizes.options[HEAD.name]
    assert isinstance(options, SequenceLabels)
    return {"L": len(options.labels)}


@dataclass(frozen=True, slots=True)
class SequenceClassificationRequest(HeadRequest):
    """Classify a sequence."""


@dataclass(frozen=True, slots=True)
class SequenceClassificationResult:
    """The logits [L] float32 of one sequence."""

    logits: NDArray[np.float32]


HEAD: Final = Head(
    name="sequence_classification",
    task="text-classification",
    inputs=(CLASS_ROWS,),
    outputs=(CLASS_LOGITS,),
    request=SequenceClassificationRequest,
    result=SequenceClassificationResult,
    pack=pack_first_rows(CLASS_ROWS),
    unpack=unpack_rows(CLASS_LOGITS, SequenceClassificationResult),
    largest_request=lambda _: SequenceClassificationRequest(),
    options=SequenceLabels,
    model_sizes=_model_sizes,
)
