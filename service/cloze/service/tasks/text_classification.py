"""Text classification: the labels of a text or of a pair of texts.

The scores are those of transformers' pipeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import Field

from cloze.model_store import Manifest
from cloze.model_store.heads import HeadRequest, sequence_classification
from cloze.model_store.heads.label_sets import LabelSet
from cloze.model_store.heads.sequence_classification import SequenceLabels, SequenceLabelSet
from cloze.service.core import Float32
from cloze.service.errors import Location
from cloze.service.tasks.task import (
    Input,
    Outputs,
    PreparedRequest,
    ScoreKind,
    Task,
    TaskContext,
    softmax,
)
from cloze.service.tasks.texts import TruncationParameters, UsageParameters, encode_pairs
from cloze.service.tasks.wire import Count, NotEmpty, Text, WireModel, check_range

Function = Literal["sigmoid", "softmax", "none"]


class TextPair(WireModel):
    """A text and an optional second text, which form one sequence."""

    text: Text
    text_pair: Text | None = None


class TextClassificationParameters(TruncationParameters, UsageParameters):
    """The parameters that huggingface_hub's ``text_classification`` sends, and truncation.

    Windows divide only a text without a pair.
    """

    label_set: str | None = None
    """name of one of the model's label sets; the default is the first"""
    top_k: Count | None = None
    """labels per text; the default is all labels"""
    function_to_apply: Function | None = None
    """function from logits to scores; the default depends on the problem type: softmax (single
    label), sigmoid (multi-label or one label), none (regression)"""


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label and its score."""

    label: str
    score: float


REQUEST: Final = {sequence_classification.HEAD.name: HeadRequest()}

_FUNCTIONS: Final[dict[str, Function]] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}


class _State(NamedTuple):
    labels: tuple[str, ...]
    logits: slice
    top_k: int | None
    function: Function
    windows: list[int]


def prepare(
    inputs: Any, parameters: TextClassificationParameters, context: TaskContext
) -> PreparedRequest[_State]:
    """Tokenize texts and pairs of texts."""
    limits = context.limits
    texts: list[Input[str | TextPair]] = limits.checked(inputs)
    if parameters.top_k is not None:
        check_range(parameters.top_k, 1, limits.max_top_k, "top_k")
    pairs: list[tuple[Location, str, str | None]] = []
    for at, text in texts:
        if isinstance(text, str):
            pairs.append((at, text, None))
            continue
        limits.checked(text.text, at.below("text"))
        if text.text_pair is not None:
            limits.checked(text.text_pair, at.below("text_pair"))
        pairs.append((at, text.text, text.text_pair))
    rule = parameters.rule(report=parameters.return_usage)
    encoder = encode_pairs(pairs, rule, context, REQUEST)
    chosen, columns = context.label_set(sequence_classification.HEAD, parameters.label_set)
    function = _function(chosen, parameters)
    windows = [len(encodings) for encodings, _ in encoder.texts]
    return encoder.prepared(_State(chosen.labels, columns, parameters.top_k, function, windows))


def sequence_labels(manifest: Manifest) -> SequenceLabels:
    """Return the label sets of a classifier."""
    options = manifest.heads[sequence_classification.HEAD.name]
    assert isinstance(options, SequenceLabels)
    return options


def _function(chosen: LabelSet, parameters: TextClassificationParameters) -> Function:
    assert isinstance(chosen, SequenceLabelSet)
    return parameters.function_to_apply or _FUNCTIONS[chosen.problem_type]


def _scores(manifest: Manifest, parameters: TextClassificationParameters) -> ScoreKind:
    chosen, _ = sequence_labels(manifest).choose(parameters.label_set)
    return score_kind(_function(chosen, parameters))


def score_kind(function: Function) -> ScoreKind:
    """Return what the scores are that a function makes of logits."""
    return "raw score" if function == "none" else "probability"


def decode(state: _State, outputs: Outputs, _: TaskContext) -> list[list[LabelScore]]:
    """Return the labels of each text, best first."""
    return best_labels(state.labels, _scores_of(state, outputs), state.top_k)


def _decode_in_order(state: _State, outputs: Outputs, _: TaskContext) -> list[list[LabelScore]]:
    rows = _scores_of(state, outputs).tolist()
    return [[*map(LabelScore, state.labels, row)] for row in rows]


def _scores_of(state: _State, outputs: Outputs) -> Float32:
    name = sequence_classification.HEAD.name
    logits = np.stack([output[name].array[state.logits] for output in outputs])
    return means(apply(state.function, logits), state.windows)


def means(scores: Float32, windows: Sequence[int]) -> Float32:
    """Return the mean scores [texts, L] of windows [n, L], by the number of each text's windows."""
    if len(windows) == len(scores):
        return scores
    sums = np.add.reduceat(scores, np.cumsum([0, *windows[:-1]]))
    averaged: Float32 = (sums / np.array(windows)[:, None]).astype(np.float32)
    return averaged


def best_labels(
    labels: Sequence[str], scores: Float32, top_k: int | None = None
) -> list[list[LabelScore]]:
    """Return the labels of each row of scores [texts, L], best first."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    return [
        [LabelScore(labels[label], float(row[label])) for label in best.tolist()]
        for row, best in zip(scores, order, strict=True)
    ]


def apply(function: Function, logits: Float32) -> Float32:
    """Return the scores [n, L] of logits [n, L]."""
    if function == "none":
        return logits
    if function == "sigmoid":
        return np.exp(-np.logaddexp(0, -logits))  # no overflow
    return softmax(logits)


TASK: Final = Task(
    name="text-classification",
    route="/classify",
    summary="The labels of a text or of a pair of texts",
    heads=(sequence_classification.HEAD.name,),
    inputs=Annotated[
        Text | TextPair | Annotated[list[Text | TextPair], NotEmpty],
        Field(description="a text, a pair of texts, or a list of either"),
    ],
    parameters=TextClassificationParameters,
    result=list[list[LabelScore]],
    own_fields=("text_pair",),
    prepare=prepare,
    decode=decode,
    scores=_scores,
    labels=lambda manifest, p: sequence_labels(manifest).choose(p.label_set)[0].labels,
    examples={
        "One text": {"inputs": "The room was loud and the staff unfriendly."},
        "A pair, its best label of one of several sets": {
            "inputs": {"text": "A dog sleeps.", "text_pair": "An animal rests."},
            "parameters": {"label_set": "inference", "top_k": 1},
        },
    },
)

IN_ORDER: Final = replace(TASK, decode=_decode_in_order)
"""The task with all labels of a text in the order of the model's labels."""
