"""Sequence classification: one logit per label for a text or a pair of texts.

The result is the logits [L] of a sequence.

Source: Devlin et al. 2019, section 4.1.
"""

from typing import Final, Literal

from cloze.model_store.heads.head import ModelSizes
from cloze.model_store.heads.label_sets import LabelSet, LabelSets
from cloze.model_store.heads.rows import per_sequence
from cloze.model_store.tensors import TensorSpec

CLASS_ROWS: Final = TensorSpec(
    "class_rows", "int32", ("C",), "the rows of `hidden` that hold `[CLS]`"
)
CLASS_LOGITS: Final = TensorSpec(
    "class_logits", "float32", ("C", "L"), "one logit for each of the model's L labels"
)

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


class SequenceLabelSet(LabelSet):
    """Labels of texts.

    Attributes:
        problem_type: how logits become scores, by the name in transformers' ``config.json``.
        raw_scores: whether a reranker's scores are its logits unless a request says otherwise, as
            sentence-transformers' ``activation_fn`` declares; null: they are their sigmoid.
    """

    problem_type: ProblemType
    raw_scores: Literal[True] | None = None


class SequenceLabels(SequenceLabelSet, LabelSets):
    """The head's section in a manifest."""

    further: tuple[SequenceLabelSet, ...] = ()


def _model_sizes(sizes: ModelSizes) -> dict[str, int]:
    options = sizes.options[HEAD.name]
    assert isinstance(options, SequenceLabels)
    return {"L": options.logits}


HEAD: Final = per_sequence(
    "sequence_classification",
    "text-classification",
    CLASS_ROWS,
    CLASS_LOGITS,
    options=SequenceLabels,
    model_sizes=_model_sizes,
)
