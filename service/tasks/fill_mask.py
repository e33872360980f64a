"""Fill-mask: the likeliest tokens for each ``[MASK]``.

Scores and result shapes are those of transformers' pipeline. `fill_tokens` fills each mask by
itself, with a token or with a word of several sub-tokens. `fill_jointly` fills all masks of a text
together.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from cloze.model_store.heads import masked_lm
from cloze.model_store.sequences import TEXT_TOKENS
from cloze.service.core import InvalidRequest, Location
from cloze.service.tasks import fill_jointly, fill_tokens
from cloze.service.tasks.task import PreparedRequest, Task, TaskContext, TaskLimits, TextUsage
from cloze.service.tasks.texts import (
    Bounds,
    EncodedText,
    LongText,
    LongTextRule,
    TextEncoder,
    UsageParameters,
    centred,
)
from cloze.service.tasks.wire import Count, Text, Texts, check_range

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


_TARGETS: Final = Location(("targets",))


def prepare(
    inputs: Any, parameters: FillMaskParameters, context: TaskContext
) -> PreparedRequest[Any]:
    """Tokenize texts that each hold at least one mask token."""
    tokenizer, limits = context.tokenizer, context.limits
    texts = limits.checked(inputs)
    top_k = 5 if parameters.top_k is None else parameters.top_k
    check_range(top_k, 1, min(limits.max_top_k, tokenizer.vocab_size), "top_k")
    targets, whole = _targets(parameters, limits), parameters.targets_as == "words"
    words, warnings = fill_tokens.target_words(tokenizer, targets, whole=whole)
    choice = parameters.long_text
    if choice is None:
        choice = "error" if whole or parameters.decode is not None else "truncate"
    rule = LongTextRule(choice, side="right", report=parameters.return_usage)
    encoder = TextEncoder(rule, context, limits.max_tokens)
    around = TEXT_TOKENS + max(map(len, words), default=1) - 1  # a word replaces a mask
    read, predictions, written = [], 0, 0
    for (at, text), ids in zip(texts, tokenizer.ids([text for _, text in texts]), strict=True):
        masks = _masks(ids, at, context)
        first, end = _part(at, len(ids), masks, encoder, around)
        windows = None
        if rule.report and choice == "window" and end - first < len(ids):
            windows = tokenizer.spans(text).characters([(first, end)])
        usage = TextUsage(len(ids) + TEXT_TOKENS, end - first + TEXT_TOKENS, windows)
        encoder.texts.append(EncodedText([], usage))
        read.append((at, ids[first:end]))
        rows = len(masks) * max(top_k, len(targets))
        predictions, written = predictions + rows, written + rows * (end - first)
    limits.check_results(predictions, "the request asks for", "predictions (masks x top_k)")
    if written > (most := _WRITTEN_TOKENS * limits.max_request_tokens):
        raise InvalidRequest(f"the predictions' texts hold {written} tokens; the limit is {most}")
    prepared: PreparedRequest[Any]
    if parameters.decode is not None:
        prepared = fill_jointly.prepare_jointly(read, parameters.decode, top_k, context)
    elif whole:
        prepared = fill_tokens.prepare_words(read, words, top_k, context)
    else:
        prepared = fill_tokens.prepare_tokens(read, words, top_k, parameters.original, context)
    described = encoder.prepared(prepared.state)
    return described._replace(
        encodings=prepared.encodings, warnings=warnings, advance=prepared.advance
    )


def _needs_thread(parameters: FillMaskParameters) -> bool:
    return (
        parameters.decode is not None
        or parameters.targets_as == "words"
        or parameters.original is not None
    )


def _targets(parameters: FillMaskParameters, limits: TaskLimits) -> list[str]:
    """Return the distinct targets."""
    targets = parameters.targets or []
    targets = [targets] if isinstance(targets, str) else targets
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
    return list(dict.fromkeys(targets))


def _masks(ids: Sequence[int], at: Location, context: TaskContext) -> list[int]:
    """Return the positions of a text's masks; raise `InvalidRequest` for none or too many."""
    masks = context.tokenizer.mask_positions(ids)
    if not masks:
        mask = context.tokenizer.mask_token
        raise InvalidRequest(f"holds no mask token; put {mask} where a word is to be guessed", at)
    if len(masks) > (most := context.limits.max_masks):
        raise InvalidRequest(f"holds {len(masks)} mask tokens; the limit is {most}", at)
    return masks


def _part(
    at: Location, tokens: int, masks: Sequence[int], encoder: TextEncoder, around: int
) -> Bounds:
    """Return the (first, end) tokens of a text that the model reads; a window is around masks."""
    room = encoder.room(at, around)
    if encoder.rule.choice == "window":
        first, end = centred((masks[0] + masks[-1] + 1) // 2, tokens, room)
    else:
        [(first, end)] = encoder.divide(at, tokens, around)
    if masks[0] < first or masks[-1] >= end:
        outside = masks[-1] if masks[-1] >= end else masks[0]
        hint = f"long_text window reads {room} tokens around the masks"
        if encoder.rule.choice == "window":
            hint = "the masks are too far apart for one window"
        raise InvalidRequest(
            f"has a mask token at token {outside + 1}, but the model reads only tokens "
            f"{first + 1} to {end}; {hint}",
            at,
        )
    return first, end


_Result = fill_tokens.Masks | fill_tokens.RankedOriginal | list[fill_jointly.Filling]

TASK: Final = Task(
    name="fill-mask",
    route="/fill-mask",
    summary="The likeliest tokens at each [MASK]",
    heads=(masked_lm.HEAD.name,),
    inputs=Annotated[
        Text | Texts, Field(description="a text with at least one [MASK], or a list of such texts")
    ],
    parameters=FillMaskParameters,
    result=_Result | list[_Result],
    prepare=prepare,
    decode=lambda filling, outputs, context: filling.decode(outputs, context),
    alone=(str,),
    needs_thread=_needs_thread,
    scores=lambda *_: "probability",
    examples={
        "One text": {"inputs": "Paris is the [MASK] of France."},
        "Targets to choose among": {
            "inputs": "The water is [MASK].",
            "parameters": {"targets": ["red", "green"]},
        },
        "Whole words to choose among": {
            "inputs": "The water is [MASK].",
            "parameters": {"targets": ["red", "unhealthy"], "targets_as": "words"},
        },
        "Two masks together": {
            "inputs": "She [MASK] the [MASK] and went in.",
            "parameters": {"decode": "beam", "top_k": 3},
        },
    },
)
