"""Fill-mask: the likeliest tokens for each ``[MASK]``.

Scores and result shapes are those of transformers' pipeline. `fill_tokens` fills each mask by
itself, and `fill_jointly` all masks of a text together.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from cloze.model_store.heads import masked_lm
from cloze.model_store.sequences import TEXT_TOKENS
from cloze.service.errors import InvalidRequest, Location, TextTooLong, TooMany
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
"""Most tokens in the result per token that a request may run, which costs more."""


class FillMaskParameters(UsageParameters):
    """The parameters that huggingface_hub's ``fill_mask`` sends, and some of our own."""

    top_k: Count | None = Field(None, description="predictions per mask; the default is 5")
    targets: str | list[str] | None = None
    """tokens to choose among; scores remain those in the whole vocabulary"""
    targets_as: Literal["tokens", "words"] | None = None
    """words: a target has all its sub-tokens; tokens, the default: the first"""
    decode: fill_jointly.Method | None = None
    """fill all masks of a text together; the default fills each by itself"""
    original: Text | Texts | None = None
    """the word at the mask, one per text: return its probability and rank"""
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
    default: LongText = "error" if whole or parameters.decode is not None else "truncate"
    choice = parameters.long_text or default
    rule = LongTextRule(choice, side="right", report=parameters.return_usage)
    encoder = TextEncoder(rule, context, limits.max_tokens)
    around = TEXT_TOKENS + max(map(len, words), default=1) - 1  # a word replaces a mask
    read, predictions, written = [], 0, 0
    for (at, text), ids in zip(texts, tokenizer.ids([text for _, text in texts]), strict=True):
        masks, (first, end) = _part(at, ids, encoder, around)
        windows = None
        if rule.report and choice == "window" and end - first < len(ids):
            windows = tokenizer.spans(text).characters([(first, end)])
        usage = TextUsage(len(ids) + TEXT_TOKENS, end - first + TEXT_TOKENS, windows)
        encoder.texts.append(EncodedText([], usage))
        read.append((at, ids[first:end]))
        rows = masks * max(top_k, len(targets))
        predictions, written = predictions + rows, written + rows * (end - first)
    limits.check_results(predictions, "the request asks for", "predictions (masks x top_k)")
    if written > (most := _WRITTEN_TOKENS * limits.max_request_tokens):
        raise TooMany(f"the predictions' texts hold {written} tokens; the limit is {most}")
    prepared: PreparedRequest[Any]
    if parameters.decode is not None:
        prepared = fill_jointly.prepare_jointly(read, parameters.decode, top_k, context)
    elif whole:
        prepared = fill_tokens.prepare_words(read, words, top_k, context)
    else:
        prepared = fill_tokens.prepare_tokens(read, words, top_k, parameters.original, context)
    return encoder.prepared(prepared.state)._replace(
        encodings=prepared.encodings, warnings=warnings, advance=prepared.advance
    )


def _targets(parameters: FillMaskParameters, limits: TaskLimits) -> list[str]:
    targets = parameters.targets or []
    targets = [targets] if isinstance(targets, str) else targets
    if (count := len(targets)) > (most := limits.max_top_k):
        raise TooMany(f"has {count} tokens; the limit is {most}", _TARGETS)
    for index, target in enumerate(targets):
        if (length := len(target)) > (most := limits.max_text_characters):
            problem = f"has {length} characters; the limit is {most}"
            raise TextTooLong(problem, _TARGETS.below(index))
    if parameters.decode is not None and targets:
        raise InvalidRequest("decode chooses among the whole vocabulary; leave out targets")
    if parameters.targets_as == "words" and not targets:
        raise InvalidRequest("targets_as words needs targets")
    if parameters.original is not None and (targets or parameters.decode is not None):
        raise InvalidRequest("original is ranked among all tokens; leave out targets and decode")
    return list(dict.fromkeys(targets))


def _part(
    at: Location, ids: Sequence[int], encoder: TextEncoder, around: int
) -> tuple[int, Bounds]:
    """Return the number of a text's masks, and the (first, end) tokens that the model reads."""
    tokenizer, most, tokens = encoder.context.tokenizer, encoder.context.limits.max_masks, len(ids)
    masks = tokenizer.mask_positions(ids)
    if not masks:
        hint = f"put {tokenizer.mask_token} where a word is to be guessed"
        raise InvalidRequest(f"holds no mask token; {hint}", at)
    if len(masks) > most:
        raise TooMany(f"holds {len(masks)} mask tokens; the limit is {most}", at)
    room = encoder.room(at, around)
    if encoder.rule.choice == "window":
        first, end = centred((masks[0] + masks[-1] + 1) // 2, tokens, room)
    else:
        [(first, end)] = encoder.divide(at, tokens, around)
    if masks[0] < first or masks[-1] >= end:
        outside = masks[-1] if masks[-1] >= end else masks[0]
        problem = f"has a mask token at token {outside + 1}, but the model reads only tokens"
        hint = f"long_text window reads {room} tokens around the masks"
        raise InvalidRequest(f"{problem} {first + 1} to {end}; {hint}", at)
    return len(masks), (first, end)


_Result = fill_tokens.Masks | fill_tokens.RankedOriginal | list[fill_jointly.Filling]

TASK: Final = Task(
    name="fill-mask",
    route="/fill-mask",
    summary="The likeliest tokens at each [MASK]",
    heads=(masked_lm.HEAD.name,),
    inputs=Annotated[Text | Texts, Field(description="a text with a [MASK], or a list of them")],
    parameters=FillMaskParameters,
    result=_Result | list[_Result],
    prepare=prepare,
    decode=lambda filling, outputs, context: filling.decode(outputs, context),
    alone=(str,),
    needs_thread=lambda asked: bool(asked.decode or asked.original or asked.targets_as == "words"),
    scores=lambda *_: "probability",
    examples={
        "One text": {"inputs": "Paris is the [MASK] of France."},
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
