"""Sequence classification: one logit per label for a text or a pair of texts.

The result is the logits [L] of a sequence.

Source: Devlin et al. 2019, section 4.1.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import SerializerFunctionWrapHandler, model_serializer

from cloze.model_store.heads.head import Head, ModelSizes
from cloze.model_store.heads.label_sets import LabelSet, LabelSets, read_labels
from cloze.model_store.heads.rows import per_sequence
from cloze.model_store.tensors import TensorSpec

CLASS_ROWS: Final = TensorSpec(
    "class_rows", "int32", ("C",), "the rows of `hidden` that hold `[CLS]`"
)
CLASS_LOGITS: Final = TensorSpec(
    "class_logits", "float32", ("C", "L"), "one logit for each of the model's L labels"
)

RERANK: Final = "rerank"
"""The task of a reranker: that of the head, with `SequenceLabels.reranks` if it has two labels."""

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
    """The head's section in a manifest.

    Attributes:
        reranks: whether the second of two labels is how relevant a text is to a query; None: two
            labels are classes.
    """

    further: tuple[SequenceLabelSet, ...] = ()
    reranks: Literal[True] | None = None

    @model_serializer(mode="wrap")
    def _leave_out(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what most classifiers do not say, so that earlier releases open a bundle."""
        section: dict[str, Any] = super()._leave_out(serialise)
        if self.reranks is None:
            section.pop("reranks", None)
        return section

    @property
    def is_reranker(self) -> bool:
        """Whether the scores of pairs are relevances of texts to queries."""
        return len(self.labels) == 1 or self.reranks is True

    def relevance(self, logits: NDArray[np.float32]) -> float:
        """Return the relevance, whose sigmoid is its probability, of the logits [L] of a pair.

        With two labels it is the difference of their logits: the sigmoid of the difference is the
        second label's softmax.
        """
        return float(logits[0] if self.reranks is None else logits[1] - logits[0])

    def reranking(self) -> Self:
        """Return the section of the same labels as a reranker's.

        Raises:
            ValueError: there are over two labels.
        """
        if len(self.labels) > 2:
            raise ValueError(f"a reranker has one label or two; the head has {len(self.labels)}")
        return self.model_copy(update={"reranks": True}) if len(self.labels) == 2 else self


def read_options(settings: Mapping[str, Any]) -> SequenceLabels:
    """Return the labels and the problem type of a ``config.json``.

    The two labels of a CrossEncoder, which sentence-transformers saved, are those of a reranker.

    Raises:
        ValueError: the labels are malformed, or the problem type or the activation is unknown.
    """
    labels = read_labels(settings)
    kind = settings.get("problem_type")
    several = "single_label_classification"
    if kind in (None, several):  # as in transformers' pipeline, the only label has a sigmoid
        kind = several if len(labels) > 1 else "multi_label_classification"
    if kind not in get_args(ProblemType):
        raise ValueError(f"problem_type {str(kind)[:80]!r} is not supported")
    raw = True if len(labels) == 1 and _declares_raw_scores(settings) else None
    section = SequenceLabels(labels=labels, problem_type=kind, raw_scores=raw)
    is_cross_encoder = isinstance(settings.get("sentence_transformers"), dict) or _OLDER in settings
    return section.reranking() if is_cross_encoder and len(labels) == 2 else section


_OLDER: Final = "sbert_ce_default_activation_function"
"""The setting of a CrossEncoder before version 4 of sentence-transformers."""


def _declares_raw_scores(settings: Mapping[str, Any]) -> bool:
    """Return whether a reranker's scores are its logits, as sentence-transformers reads it.

    Without an activation it is the sigmoid, and so is one outside of torch, which is never loaded.
    """
    declared = settings.get("sentence_transformers")
    path = settings.get(_OLDER)
    if isinstance(declared, dict):
        path = declared.get("activation_fn", path)
    if not str(path).startswith("torch."):
        return False
    name = str(path).rsplit(".", 1)[-1]
    if name not in ("Identity", "Sigmoid"):
        raise ValueError(
            f"a reranker with the activation {path} is not supported (Identity, Sigmoid)"
        )
    return name == "Identity"


def _model_sizes(sizes: ModelSizes) -> dict[str, int]:
    options = sizes.options[HEAD.name]
    assert isinstance(options, SequenceLabels)
    return {"L": options.logits}


HEAD: Final = Head(
    "sequence_classification",
    "text-classification",
    (CLASS_ROWS,),
    (CLASS_LOGITS,),
    *per_sequence(CLASS_ROWS, CLASS_LOGITS),
    options=SequenceLabels,
    model_sizes=_model_sizes,
)
