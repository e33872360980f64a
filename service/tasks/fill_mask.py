"""Fill-mask: the likeliest tokens for each ``[MASK]``.

Scores and result shapes are those of transformers' pipeline. `fill_tokens` fills each mask with a
token, `fill_words` with a word of several sub-tokens, and `fill_jointly` fills all masks of a text
together. `fill_length` cuts long texts.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import Field

from cloze.model_store.batch import HeadOutputs
from cloze.model_store.heads import masked_lm
from cloze.service.core import InvalidRequest, Location
from cloze.service.tasks import fill_jointly, fill_length, fill_tokens, fill_words
from cloze.service.tasks.long_text import LongText, UsageParameters
from cloze.service.tasks.task import (
    Count,
    Example,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    TaskLimits,
    Text,
    Texts,
    check_range,
    check_text,
    input_name,
    listed,
)

_WRITTEN_TOKENS = 4
"""Most tokens in the result per token that a request may run.

Writing a token costs less than running a token.
"""


class FillMaskParameters(UsageParameters):
    """The parameters that huggingface_hub's ``fill_mask`` sends, and some of our own."""

    top_k: Count | None = Field(None, description="predictions per mask; the default is 5")
    targets: str | list[str] | None = Field(
        None,
        description="tokens to choose among; a score remains the softmax over the whole vocabulary",
    )
    targets_as: Literal["tokens", "words"] | None = Field(
        None,
        description="words: a target of several sub-tokens has the probability of all of them; "
        "the default, tokens, takes the first sub-token",
    )
    decode: fill_jointly.Method | None = Field(
        None,
        description="fill all masks of a text together, and return whole fillings with their joint "
        "probability; the default is to fill each mask by itself",
    )
    original: Text | Texts | None = Field(
        None,
        description="the word that stood at the mask, one per text: return its probability, and "
        "its rank in the vocabulary, with the predictions",
    )
    long_text: LongText | None = Field(
        None,
        description="error refuses a long text, truncate cuts its end, window keeps the part "
        "around its masks; the default is truncate, with decode or targets_as words error",
    )


class _Filling(Protocol):
    """The state of a request."""

    def decode(self, outputs: Sequence[HeadOutputs], context: TaskContext) -> Any:
        """Return the result."""


_TARGETS: Final = Location(("targets",))


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[Any]:
    """Tokenize texts that each hold at least one mask token.

    Raises:
        InvalidRequest: a text has no mask, too many masks, or a mask after the model's limit; or a
            parameter is out of its limits, or contradicts another one.
    """
    parameters: FillMaskParameters = call.parameters
    tokenizer, limits = context.tokenizer, context.limits
    texts, many = listed(call.inputs, limits), isinstance(call.inputs, list)
    targets = parameters.targets or []
    targets = [targets] if isinstance(targets, str) else targets
    top_k = 5 if parameters.top_k is None else parameters.top_k
    check_range(top_k, 1, min(limits.max_top_k, tokenizer.vocab_size), "top_k")
    _check_targets(parameters, targets, limits)
    targets = list(dict.fromkeys(targets))
    for index, text in enumerate(texts):
        check_text(text, input_name(index, many=many), limits)
    as_words = bool(targets) and parameters.targets_as == "words"
    words = fill_words.vocabulary_words(tokenizer, targets) if as_words else None
    choice = parameters.long_text
    if choice is None:
        choice = "error" if as_words or parameters.decode is not None else "truncate"
    longest = words.longest if words else 1
    shortener = fill_length.Shortener(
        choice, context, longest, report=bool(parameters.return_usage)
    )
    counter = _PredictionCounter(limits, max(top_k, len(targets)))
    ids = []
    for index, text in enumerate(tokenizer.ids(texts)):
        name = input_name(index, many=many)
        ids.append(shortener.shortened(text, texts[index], name))
        counter.add(len(tokenizer.mask_positions(ids[-1])), len(ids[-1]))
    prepared: PreparedRequest[Any]
    if parameters.decode is not None:
        method = parameters.decode
        prepared = fill_jointly.prepare_jointly(ids, method, top_k, context, many=many)
    elif words is not None:
        prepared = fill_words.prepare_words(ids, words, top_k, context, many=many)
    elif parameters.original is not None:
        originals = parameters.original
        originals = [originals] if isinstance(originals, str) else originals
        prepared = fill_tokens.prepare_originals(ids, originals, top_k, context, many=many)
        prepared = prepared._replace(results=counter.predictions)
    else:
        prepared = fill_tokens.prepare_tokens(ids, targets, top_k, context, many=many)
        prepared = prepared._replace(results=counter.predictions)
    return prepared._replace(truncated=shortener.truncated, usage=shortener.usage, texts=len(texts))


def _takes_long(call: TaskCall) -> bool:
    parameters: FillMaskParameters = call.parameters
    return (
        parameters.decode is not None
        or parameters.targets_as == "words"
        or parameters.original is not None
    )


def _check_targets(
    parameters: FillMaskParameters, targets: Sequence[str], limits: TaskLimits
) -> None:
    if len(targets) > limits.max_top_k:
        raise InvalidRequest(
            f"has {len(targets)} tokens; the limit is {limits.max_top_k}", _TARGETS
        )
    for index, target in enumerate(targets):
        if len(target) > (longest := limits.max_text_characters):
            raise InvalidRequest(
                f"has {len(target)} characters; the limit is {longest}", _TARGETS.below(index)
            )
    if parameters.decode is not None and targets:
        raise InvalidRequest("decode chooses among the whole vocabulary; leave out targets")
    if parameters.targets_as == "words" and not targets:
        raise InvalidRequest("targets_as words needs targets")
    if parameters.original is not None and (targets or parameters.decode is not None):
        raise InvalidRequest(
            "original is ranked in the whole vocabulary; leave out targets and decode"
        )


class _PredictionCounter:
    """Counts a request's predictions and the tokens of their sequences against the limits."""

    def __init__(self, limits: TaskLimits, predictions_per_mask: int) -> None:
        self._limits, self._per_mask = limits, predictions_per_mask
        self.predictions = 0
        self._written = 0

    def add(self, masks: int, tokens: int) -> None:
        """Count one text.

        Raises:
            InvalidRequest: the request exceeds the limit of predictions or of written tokens.
        """
        self.predictions += self._per_mask * masks
        self._written += self._per_mask * masks * tokens
        if self.predictions > (most := self._limits.max_results):
            raise InvalidRequest(
                f"the request asks for more than {most} predictions (masks x top_k), the limit"
            )
        if self._written > (most := _WRITTEN_TOKENS * self._limits.max_request_tokens):
            raise InvalidRequest(
                f"the predictions' sequences would hold more than {most} tokens, the limit"
            )


def decode(
    prepared: PreparedRequest[_Filling], outputs: Sequence[HeadOutputs], context: TaskContext
) -> Any:
    """Return the result for one text, or a list of results if the inputs are a list."""
    return prepared.state.decode(outputs, context)


_Result = (
    fill_tokens.Masks | fill_tokens.RankedOriginal | fill_words.Words | list[fill_jointly.Filling]
)

TASK: Final = Task(
    name="fill-mask",
    route="/fill-mask",
    summary="The likeliest tokens at each [MASK]",
    heads=(masked_lm.HEAD.name,),
    inputs=Annotated[
        Text | Texts,
        Field(
            description="a text with at least one [MASK], or a list of such texts",
            examples=["Paris is the [MASK] of France."],
        ),
    ],
    parameters=FillMaskParameters,
    result=_Result | list[_Result],
    prepare=prepare,
    decode=decode,
    takes_long=_takes_long,
    examples=(
        Example("One text", {"inputs": "Paris is the [MASK] of France."}),
        Example(
            "Targets to choose among",
            {"inputs": "The water is [MASK].", "parameters": {"targets": ["red", "green"]}},
        ),
        Example(
            "Whole words to choose among",
            {
                "inputs": "The water is [MASK].",
                "parameters": {"targets": ["red", "unhealthy"], "targets_as": "words"},
            },
        ),
        Example(
            "Two masks together",
            {
                "inputs": "She [MASK] the [MASK] and went in.",
                "parameters": {"decode": "beam", "top_k": 3},
            },
        ),
    ),
)
