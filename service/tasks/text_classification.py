"""Text classification: the labels of a text or of a pair of texts.

The scores are those of transformers' pipeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import Field

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import sequence_classification
from cloze.model_store.heads.sequence_classification import SequenceLabels
from cloze.service.core import Float32
from cloze.service.tasks.task import (
    Count,
    Example,
    FirstError,
    NotEmpty,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    Text,
    TruncationParameters,
    WireModel,
    check_range,
    check_text,
    input_name,
    listed,
)

Function = Literal["sigmoid", "softmax", "none"]


class TextPair(WireModel):
    """A text and an optional second text, which form one sequence."""

    text: Text
    text_pair: Text | None = None


class TextClassificationParameters(TruncationParameters):
    """The parameters that huggingface_hub's ``text_classification`` sends, and truncation."""

    top_k: Count | None = Field(None, description="labels per text; the default is all labels")
    function_to_apply: Function | None = Field(
        None,
        description="function from logits to scores; the default depends on the problem type: "
        "softmax (single label), sigmoid (multi-label or one label), none (regression)",
    )


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label and its score."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class _State:
    top_k: int | None
    function: Function


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[_State]:
    """Tokenize the texts.

    Raises:
        EmptyRequest: there is no text, or a text is empty.
        InvalidRequest: a parameter is out of its limits, or a text is too long and ``truncate`` is
            false.
    """
    parameters: TextClassificationParameters = call.parameters
    tokenizer, limits = context.tokenizer, context.limits
    texts: list[str | TextPair] = listed(call.inputs, limits)
    many = isinstance(call.inputs, list)
    if parameters.top_k is not None:
        check_range(parameters.top_k, 1, limits.max_top_k, "top_k")
    pairs = [(t, None) if isinstance(t, str) else (t.text, t.text_pair) for t in texts]
    for index, (first, second) in enumerate(pairs):
        name = input_name(index, many=many)
        check_text(first, name if isinstance(texts[index], str) else f"{name}.text", limits)
        if second is not None:
            check_text(second, f"{name}.text_pair", limits)
    firsts = tokenizer.ids([first for first, _ in pairs])
    seconds = tokenizer.ids([second or "" for _, second in pairs])
    keep_end = parameters.keep_end
    encodings: list[Encoding] = []
    truncated = 0
    for (_, second), first_ids, second_ids in zip(pairs, firsts, seconds, strict=True):
        if second is None:
            encoding, cut = tokenizer.encode(first_ids, limits.max_tokens, keep_end=keep_end)
        else:
            encoding, cut = tokenizer.pair(
                first_ids, second_ids, limits.max_tokens, keep_end=keep_end
            )
        if cut:
            tokens = len(first_ids) + 2 + (0 if second is None else len(second_ids) + 1)
            name = input_name(len(encodings), many=many)
            parameters.check_cut(name, tokens, limits.max_tokens)
        encoding.requests = _REQUEST
        encodings.append(encoding)
        truncated += cut
    function = parameters.function_to_apply or _FUNCTIONS[_labels(context).problem_type]
    return PreparedRequest(encodings, _State(parameters.top_k, function), truncated=truncated)


_REQUEST: Final = {
    sequence_classification.HEAD.name: sequence_classification.SequenceClassificationRequest()
}

_FUNCTIONS: Final[dict[str, Function]] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}


def _labels(context: TaskContext) -> SequenceLabels:
    options = context.manifest.heads[sequence_classification.HEAD.name]
    assert isinstance(options, SequenceLabels)
    return options


def decode(
    prepared: PreparedRequest[_State], outputs: Sequence[HeadOutputs], context: TaskContext
) -> list[list[LabelScore]]:
    """Return the labels of each text, best first."""
    labels = _labels(context).labels
    name = sequence_classification.HEAD.name
    logits = np.stack([output[name].logits for output in outputs])
    scores = _apply(prepared.state.function, logits)
    order = np.argsort(-scores, axis=1, kind="stable")[:, : prepared.state.top_k]
    return [
        [LabelScore(labels[label], float(row[label])) for label in best.tolist()]
        for row, best in zip(scores, order, strict=True)
    ]


def _apply(function: Function, logits: Float32) -> Float32:
    """Return the scores [n, L] of logits [n, L]."""
    if function == "none":
        return logits
    if function == "sigmoid":
        one = np.float32(1)
        return one / (one + np.exp(-logits))
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)  # type: ignore[no-any-return]


TASK: Final = Task(
    name="text-classification",
    route="/classify",
    summary="The labels of a text or of a pair of texts",
    heads=(sequence_classification.HEAD.name,),
    inputs=Annotated[
        Text | TextPair | Annotated[list[Text | TextPair], FirstError(), NotEmpty],
        Field(
            description="a text, a pair of texts, or a list of either",
            examples=["The room was loud and the staff unfriendly."],
        ),
    ],
    parameters=TextClassificationParameters,
    result=list[list[LabelScore]],
    own_fields=("text_pair",),
    prepare=prepare,
    decode=decode,
    examples=(
        Example("One text", {"inputs": "The room was loud and the staff unfriendly."}),
        Example(
            "A pair, its best label",
            {
                "inputs": {"text": "A dog sleeps.", "text_pair": "An animal rests."},
                "parameters": {"top_k": 1},
            },
        ),
    ),
)
