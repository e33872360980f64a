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
from cloze.service.core import Float32, InvalidRequest, Location
from cloze.service.tasks.long_text import (
    TruncationParameters,
    UsageParameters,
    WindowBudget,
    characters,
)
from cloze.service.tasks.task import (
    Count,
    Example,
    NotEmpty,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    Text,
    TextUsage,
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


class TextClassificationParameters(TruncationParameters, UsageParameters):
    """The parameters that huggingface_hub's ``text_classification`` sends, and truncation."""

    long_text: Literal["error", "truncate", "window"] | None = Field(  # type: ignore[assignment]  # one more choice
        None,
        description="error refuses a long text, truncate cuts it, window divides a text (no pair) "
        "and returns the mean of its windows' scores; the default is truncate",
    )

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
    windows: list[int] | None


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[_State]:
    """Tokenize the texts.

    Raises:
        EmptyRequest: there is no text, or a text is empty.
        InvalidRequest: a parameter is out of its limits, or a text is too long and long texts are
            refused; or its windows have more tokens than a request may.
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
        check_text(first, name if isinstance(texts[index], str) else name.below("text"), limits)
        if second is not None:
            check_text(second, name.below("text_pair"), limits)
    firsts = tokenizer.ids([first for first, _ in pairs])
    seconds = tokenizer.ids([second or "" for _, second in pairs])
    encoder = _Encoder(parameters, context)
    for index, (first, second) in enumerate(pairs):
        name = input_name(index, many=many)
        if second is None:
            encoder.add_text(first, firsts[index], name)
        else:
            encoder.add_pair(firsts[index], seconds[index], name)
    function = parameters.function_to_apply or _FUNCTIONS[_labels(context).problem_type]
    windows = encoder.windows if parameters.long_text == "window" else None
    return PreparedRequest(
        encoder.encodings,
        _State(parameters.top_k, function, windows),
        results=len(encoder.encodings),
        truncated=encoder.truncated,
        usage=encoder.usage,
        texts=len(texts),
    )


class _Encoder:
    """Builds the encodings of one request.

    Attributes:
        encodings: one per text or pair, or one per window of a text.
        windows: number of encodings of each text or pair.
        truncated: number of texts and pairs that were cut.
        usage: how much of each was used; None unless the client asks.
    """

    def __init__(self, parameters: TextClassificationParameters, context: TaskContext) -> None:
        self._parameters, self._context = parameters, context
        self._choice = parameters.choice
        self._budget = WindowBudget(context.limits)
        self.encodings: list[Encoding] = []
        self.windows: list[int] = []
        self.truncated = 0
        self.usage: list[TextUsage] | None = [] if parameters.return_usage else None

    def add_text(self, text: str, ids: list[int], name: Location) -> None:
        """Add a text; ``ids`` are its tokens, without special tokens."""
        tokenizer, most = self._context.tokenizer, self._context.limits.max_tokens
        if self._choice == "window" and len(ids) > most - 2:
            bounds = self._budget.divide(len(ids), most - 2, name)
            windows = [tokenizer.encode(ids[first:end], most)[0] for first, end in bounds]
            places = None
            if self.usage is not None:
                places = characters(bounds, tokenizer.spans(text).offsets)
            self._add(windows, TextUsage(len(ids) + 2, len(ids) + 2, places))
            return
        encoding, cut = tokenizer.encode(ids, most, keep_end=self._parameters.keep_end)
        self._add_one(encoding, cut, len(ids) + 2, name)

    def add_pair(self, first: list[int], second: list[int], name: Location) -> None:
        """Add a pair of texts by their tokens, without special tokens."""
        tokenizer, most = self._context.tokenizer, self._context.limits.max_tokens
        tokens = len(first) + len(second) + tokenizer.special.pair_tokens
        if self._choice == "window" and tokens > most:
            raise InvalidRequest(
                f"is a pair of {tokens} tokens; the model reads {most}, and long_text "
                "window divides only texts without a pair",
                name,
            )
        encoding, cut = tokenizer.pair(first, second, most, keep_end=self._parameters.keep_end)
        self._add_one(encoding, cut, tokens, name)

    def _add_one(self, encoding: Encoding, cut: bool, tokens: int, name: Location) -> None:
        if cut:
            self._parameters.check_cut(name, tokens, self._context.limits.max_tokens)
        self.truncated += cut
        self._add([encoding], TextUsage(tokens, len(encoding)))

    def _add(self, encodings: list[Encoding], usage: TextUsage) -> None:
        for encoding in encodings:
            encoding.requests = _REQUEST
        self.encodings += encodings
        self.windows.append(len(encodings))
        if self.usage is not None:
            self.usage.append(usage)


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
    if (windows := prepared.state.windows) is not None:
        sums = np.add.reduceat(scores, np.cumsum([0, *windows[:-1]]))
        scores = (sums / np.array(windows)[:, None]).astype(np.float32)
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
        Text | TextPair | Annotated[list[Text | TextPair], NotEmpty],
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
