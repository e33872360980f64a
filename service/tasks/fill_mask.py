"""Fill-mask: the likeliest tokens for each ``[MASK]``.

Scores and result shapes are those of transformers' pipeline. `fill_tokens` fills each mask by
itself, with a token or with a word of several sub-tokens. `fill_jointly` fills all masks of a text
together.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import Field

from cloze.model_store.batch import HeadOutputs
from cloze.model_store.heads import masked_lm
from cloze.service.core import InvalidRequest, Location
from cloze.service.tasks import fill_jointly, fill_tokens
from cloze.service.tasks.long_text import LongText, UsageParameters, characters
from cloze.service.tasks.task import (
    Count,
    Example,
    Input,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    TaskLimits,
    Text,
    Texts,
    TextUsage,
    check_range,
    check_text,
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
        """Return the result for each text."""


_TARGETS: Final = Location(("targets",))


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[Any]:
    """Tokenize texts that each hold at least one mask token.

    Raises:
        InvalidRequest: a text has no mask, too many masks, or a mask after the model's limit; or a
            parameter is out of its limits, or contradicts another one.
    """
    parameters: FillMaskParameters = call.parameters
    tokenizer, limits = context.tokenizer, context.limits
    texts = listed(call.inputs, limits)
    targets = parameters.targets or []
    targets = [targets] if isinstance(targets, str) else targets
    top_k = 5 if parameters.top_k is None else parameters.top_k
    check_range(top_k, 1, min(limits.max_top_k, tokenizer.vocab_size), "top_k")
    _check_targets(parameters, targets, limits)
    targets = list(dict.fromkeys(targets))
    for at, text in texts:
        check_text(text, at, limits)
    as_words = bool(targets) and parameters.targets_as == "words"
    words = fill_tokens.vocabulary_words(tokenizer, targets) if as_words else None
    choice = parameters.long_text
    if choice is None:
        choice = "error" if as_words or parameters.decode is not None else "truncate"
    longest = words.longest if words else 1
    shortener = _Shortener(choice, context, longest, report=bool(parameters.return_usage))
    counter = _PredictionCounter(limits, max(top_k, len(targets)))
    ids = []
    for text, text_ids in zip(texts, tokenizer.ids([text for _, text in texts]), strict=True):
        read = shortener.shortened(text_ids, text)
        counter.add(len(tokenizer.mask_positions(read)), len(read))
        ids.append(Input(text.at, read))
    prepared: PreparedRequest[Any]
    if parameters.decode is not None:
        prepared = fill_jointly.prepare_jointly(ids, parameters.decode, top_k, context)
    elif words is not None:
        prepared = fill_tokens.prepare_words(ids, words, top_k, context)
    elif parameters.original is not None:
        originals = parameters.original
        originals = [originals] if isinstance(originals, str) else originals
        prepared = fill_tokens.prepare_originals(ids, originals, top_k, context)
        prepared = prepared._replace(results=counter.predictions)
    else:
        prepared = fill_tokens.prepare_tokens(ids, targets, top_k, context)
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


class _Shortener:
    """Cuts the texts of one request.

    Args:
        choice: what to do with a long text. ``window`` keeps the part around its masks.
        context: the model.
        longest: most tokens that replace a mask.
        report: whether to report how much of each text was used.

    Attributes:
        truncated: number of texts that were cut.
        usage: how much of each text was used; None without a report.
    """

    def __init__(
        self, choice: LongText, context: TaskContext, longest: int, *, report: bool
    ) -> None:
        self._choice, self._context, self._longest = choice, context, longest
        self.truncated = 0
        self.usage: list[TextUsage] | None = [] if report else None

    def shortened(self, ids: Sequence[int], text: Input[str]) -> Sequence[int]:
        """Return the ids of a text that the model reads, without special tokens.

        Args:
            ids: ids of the text, without special tokens.
            text: the text.

        Raises:
            InvalidRequest: the text has no mask, too many masks, or a mask outside the part that
                the model reads; or the text is too long.
        """
        masks = self._masks(ids, text.at)
        most = self._context.limits.max_tokens
        room = most - 2 - (self._longest - 1)
        if room < 1:
            raise InvalidRequest(
                f"the longest target has {self._longest} tokens; the model reads {most}"
            )
        first = 0
        if len(ids) > room:
            if self._choice == "error":
                target = " with its longest target" if self._longest > 1 else ""
                tokens = len(ids) + 2 + self._longest - 1
                raise InvalidRequest(
                    f"has {tokens} tokens{target}; the model reads {most}", text.at
                )
            if self._choice == "window":
                first = _first_of_window(masks, len(ids), room, text.at)
            elif (last := masks[-1] + 1) > room:
                raise InvalidRequest(
                    f"has a mask token at token {last}, but the model reads only the first "
                    f"{room} of a text; long_text window reads the part around the masks",
                    text.at,
                )
            self.truncated += 1
        end = min(len(ids), first + room)
        if self.usage is not None:
            windows = None
            if self._choice == "window" and len(ids) > room:
                offsets = self._context.tokenizer.spans(text.value).offsets
                windows = characters([(first, end)], offsets)
            self.usage.append(TextUsage(len(ids) + 2, end - first + 2, windows))
        return ids[first:end]

    def _masks(self, ids: Sequence[int], at: Location) -> list[int]:
        """Return the positions of a text's masks."""
        tokenizer, most = self._context.tokenizer, self._context.limits.max_masks
        masks = tokenizer.mask_positions(ids)
        if not masks:
            mask = tokenizer.mask_token
            raise InvalidRequest(
                f"holds no mask token; put {mask} where a word is to be guessed",
                at,
            )
        if len(masks) > most:
            raise InvalidRequest(f"holds {len(masks)} mask tokens; the limit is {most}", at)
        return masks


def _first_of_window(masks: Sequence[int], tokens: int, room: int, at: Location) -> int:
    """Return the first token of the window that has a text's masks in its middle."""
    between = masks[-1] - masks[0] + 1
    if between > room:
        raise InvalidRequest(
            f"has {between} tokens from its first to its last mask; a window has {room}",
            at,
        )
    middle = (masks[0] + masks[-1] + 1) // 2
    return min(max(middle - room // 2, 0), tokens - room)


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
    """Return the result for each text."""
    return prepared.state.decode(outputs, context)


_Result = (
    fill_tokens.Masks | fill_tokens.RankedOriginal | fill_tokens.Words | list[fill_jointly.Filling]
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
    alone=(str,),
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
