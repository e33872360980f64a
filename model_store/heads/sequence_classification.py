"""Sequence classification: one logit per label for a text or a pair of texts.

The result is the logits [L] of a sequence.

Source: Devlin et al. 2019, section 4.1.
"""

from typing import Final, Literal

from pydantic import Field

from cloze.model_store.heads.head import Frozen, ModelSizes
from cloze.model_store.heads.rows import per_sequence
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
        raw_scores: whether a reranker's scores are its logits unless a request says otherwise, as
            sentence-transformers' ``activation_fn`` declares; null: they are their sigmoid.
    """

    labels: tuple[str, ...] = Field(min_length=1)
    problem_type: ProblemType
    raw_scores: Literal[True] | None = None


def _model_sizes(sizes: ModelSizes) -> dict[str, int]:
    options = sizes.options[HEAD.name]
    assert isinstance(options, SequenceLabels)
    return {"L": len(options.labels)}


HEAD: Final = per_sequence(
    "sequence_classification",
    "text-classification",
    CLASS_ROWS,
    CLASS_LOGITS,
    options=SequenceLabels,
    model_sizes=_model_sizes,
)
