"""Fill-mask: the likeliest tokens for each ``[MASK]``.

Scores and result shapes are those of transformers' pipeline. The score of a token is its softmax
over the whole vocabulary, also if the request names targets. The first sub-token replaces a target
that is not one token, and a warning says so. `fill_words` takes such targets as whole words, and
`fill_jointly` fills all masks of a text together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Protocol

import numpy as np
from pydantic import Field

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import masked_lm
from cloze.service.core import InvalidRequest
from cloze.service.tasks import fill_jointly, fill_words
from cloze.service.tasks.task import (
    Count,
    Example,
    FirstError,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    TaskLimits,
    Text,
    Texts,
    WireModel,
    check_range,
    check_text,
    input_name,
    listed,
)
from cloze.service.tokenizer import Tokenizer

_WRITTEN_TOKENS = 4
"""Most tokens in the result per token that a request may run.

Writing a token costs less than running a token.
"""


class FillMaskParameters(WireModel):
    """The parameters that huggingface_hub's ``fill_mask`` sends."""

    top_k: Count | None = Field(None, description="predictions per mask; the default is 5")
    targets: str | Annotated[list[str], FirstError()] | None = Field(
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


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted token for one mask."""

    score: float
    token: int
    token_str: str
    sequence: str


Masks = list[Prediction] | list[list[Prediction]]
"""The predictions for one text, best first; one list per mask if the text has several masks."""


class _Filling(Protocol):
    """The state of a request."""

    def decode(self, outputs: Sequence[HeadOutputs], context: TaskContext) -> Any:
        """Return the result."""


@dataclass(frozen=True, slots=True)
class _TokenFilling:
    """The state of a request that fills each mask by itself."""

    encodings: Sequence[Encoding]
    top_k: int
    many: bool

    def decode(self, outputs: Sequence[HeadOutputs], context: TaskContext) -> Masks | list[Masks]:
        """Return the predictions for one text, or a list of them if the inputs are a list."""
        results: list[Masks] = []
        for encoding, output in zip(self.encodings, outputs, strict=True):
            masks = _predictions(context.tokenizer, encoding, output, self.top_k)
            results.append(masks[0] if len(masks) == 1 else masks)
        return results if self.many else results[0]


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
    ids = tokenizer.ids(texts)
    counter = _PredictionCounter(limits, max(top_k, len(targets)))
    for index, text in enumerate(ids):
        masks = _count_masks(tokenizer, text, input_name(index, many=many), limits)
        counter.add(masks, min(len(text), limits.max_tokens))
    if parameters.decode is not None:
        return fill_jointly.prepare_jointly(ids, parameters.decode, top_k, context, many=many)
    if targets and parameters.targets_as == "words":
        return fill_words.prepare_words(ids, targets, top_k, context, many=many)
    return _prepare_tokens(ids, counter.predictions, targets, top_k, context, many=many)


def _takes_long(call: TaskCall) -> bool:
    parameters: FillMaskParameters = call.parameters
    return parameters.decode is not None or parameters.targets_as == "words"


def _check_targets(
    parameters: FillMaskParameters, targets: Sequence[str], limits: TaskLimits
) -> None:
    if len(targets) > limits.max_top_k:
        raise InvalidRequest(f"targets has {len(targets)} tokens; the limit is {limits.max_top_k}")
    for index, target in enumerate(targets):
        if len(target) > (most := limits.max_text_characters):
            raise InvalidRequest(
                f"targets[{index}] has {len(target)} characters; the limit is {most}"
            )
    if parameters.decode is not None and targets:
        raise InvalidRequest("decode chooses among the whole vocabulary; leave out targets")
    if parameters.targets_as == "words" and not targets:
        raise InvalidRequest("targets_as words needs targets")


def _prepare_tokens(
    ids: Sequence[Sequence[int]],
    predictions: int,
    targets: Sequence[str],
    top_k: int,
    context: TaskContext,
    *,
    many: bool,
) -> PreparedRequest[_TokenFilling]:
    tokenizer = context.tokenizer
    target_ids, warnings = _target_ids(tokenizer, targets)
    encodings, truncated = [], 0
    for text in ids:
        encoding, cut = tokenizer.encode(text, context.limits.max_tokens)
        positions = np.flatnonzero(encoding.input_ids == tokenizer.mask_id).tolist()
        request = masked_lm.MaskedLMRequest(positions, 0 if target_ids else top_k, target_ids)
        encoding.requests = {masked_lm.HEAD.name: request}
        encodings.append(encoding)
        truncated += cut
    state = _TokenFilling(encodings, top_k, many)
    return PreparedRequest(encodings, state, predictions, truncated, warnings)


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


def _count_masks(tokenizer: Tokenizer, ids: Sequence[int], name: str, limits: TaskLimits) -> int:
    """Return the number of masks in a text.

    Raises:
        InvalidRequest: the text has no mask, too many masks, or a mask after the model's limit.
    """
    positions = tokenizer.mask_positions(ids)
    if not positions:
        raise InvalidRequest(
            f"{name} holds no mask token; put {tokenizer.mask_token} where a word is to be guessed"
        )
    if len(positions) > limits.max_masks:
        raise InvalidRequest(
            f"{name} holds {len(positions)} mask tokens; the limit is {limits.max_masks}"
        )
    if (last := positions[-1] + 1) > limits.max_tokens - 2:
        raise InvalidRequest(
            f"{name} has a mask token at token {last}, but the model reads only the first "
            f"{limits.max_tokens - 2} of a text"
        )
    return len(positions)


def _target_ids(tokenizer: Tokenizer, targets: Sequence[str]) -> tuple[list[int], tuple[str, ...]]:
    """Return the distinct ids of the targets, and warnings about targets that are not one token."""
    target_ids: dict[int, None] = {}  # ordered
    warnings = []
    for target in targets:
        target_id = tokenizer.id_of(target)
        if target_id is None:
            pieces = tokenizer.ids([target])[0]
            shown = ascii(target)
            if not pieces:
                warnings.append(f"target {shown} is not in the vocabulary and was left out")
                continue
            target_id = pieces[0]
            piece = tokenizer.decode([[target_id]])[0]
            warnings.append(f"target {shown} is not in the vocabulary; {piece!a} stands for it")
        target_ids[target_id] = None
    if targets and not target_ids:
        raise InvalidRequest("none of the targets has a token in the model's vocabulary")
    return list(target_ids), tuple(warnings)


def decode(
    prepared: PreparedRequest[_Filling], outputs: Sequence[HeadOutputs], context: TaskContext
) -> Any:
    """Return the result for one text, or a list of results if the inputs are a list."""
    return prepared.state.decode(outputs, context)


def _predictions(
    tokenizer: Tokenizer, encoding: Encoding, output: HeadOutputs, top_k: int
) -> list[list[Prediction]]:
    request: masked_lm.MaskedLMRequest = encoding.requests[masked_lm.HEAD.name]  # type: ignore[assignment]
    result: masked_lm.MaskedLMResult = output[masked_lm.HEAD.name]
    sequence = encoding.input_ids.tolist()
    only_one = len(request.positions) == 1
    masks = []
    for mask, position in enumerate(request.positions):
        if request.targets:
            logits = result.target_logits[mask]  # [n]
            best = np.argsort(-logits, kind="stable")[:top_k]
            logits, tokens = logits[best], [request.targets[choice] for choice in best]
        else:
            logits, tokens = result.top_logits[mask], result.top_ids[mask].tolist()  # [k]
        scores = np.exp(logits - result.logsumexp[mask]).tolist()
        filled = [[*sequence[:position], token, *sequence[position + 1 :]] for token in tokens]
        # If a text has several masks, the sequences keep the other masks and all special tokens,
        # as in transformers.
        texts = tokenizer.decode(filled, skip_special_tokens=only_one)
        words = tokenizer.decode([[token] for token in tokens])
        predictions = zip(scores, tokens, words, texts, strict=True)
        masks.append([Prediction(*prediction) for prediction in predictions])
    return masks


_Result = Masks | fill_words.Words | list[fill_jointly.Filling]

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
