"""Fill-mask with tokens: each mask by itself, among the whole vocabulary or among targets.

The score of a token is its softmax over the whole vocabulary, also if the request names targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import masked_lm
from cloze.service.core import InvalidRequest, Location
from cloze.service.tasks.task import PreparedRequest, TaskContext, check_text, input_name
from cloze.service.tokenizer import Tokenizer

_MOST_RANKED: Final = 64
"""Most texts of a request whose original tokens are ranked, for each needs V numbers."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted token for one mask."""

    score: float
    token: int
    token_str: str
    sequence: str


Masks = list[Prediction] | list[list[Prediction]]
"""The predictions for one text, best first; one list per mask if the text has several masks."""


@dataclass(frozen=True, slots=True)
class OriginalToken:
    """A token that stood at a mask: its probability, and its rank in the vocabulary, from 1."""

    token: int
    token_str: str
    score: float
    rank: int


@dataclass(frozen=True, slots=True)
class RankedOriginal:
    """The predictions for the mask of a text, and the token that stood there."""

    predictions: list[Prediction]
    original: OriginalToken


@dataclass(frozen=True, slots=True)
class TokenFilling:
    """The state of a request that fills each mask by itself.

    Attributes:
        encodings: the texts.
        top_k: most predictions per mask.
        many: whether the inputs are a list.
        originals: the token that stood at the only mask of each text; None: not asked for.
    """

    encodings: Sequence[Encoding]
    top_k: int
    many: bool
    originals: Sequence[int] | None = None

    def decode(self, outputs: Sequence[HeadOutputs], context: TaskContext) -> Any:
        """Return the predictions for one text, or a list of them if the inputs are a list."""
        tokenizer = context.tokenizer
        results: list[Masks | RankedOriginal] = []
        for index, (encoding, output) in enumerate(zip(self.encodings, outputs, strict=True)):
            result: masked_lm.MaskedLMResult = output[masked_lm.HEAD.name]
            if self.originals is not None:
                [predictions] = _predictions(tokenizer, encoding, result, self.top_k, ())
                original = _original(tokenizer, result, self.originals[index])
                results.append(RankedOriginal(predictions, original))
                continue
            request: masked_lm.MaskedLMRequest = encoding.requests[masked_lm.HEAD.name]  # type: ignore[assignment]
            masks = _predictions(tokenizer, encoding, result, self.top_k, request.targets)
            results.append(masks[0] if len(masks) == 1 else masks)
        return results if self.many else results[0]


def prepare_tokens(
    ids: Sequence[Sequence[int]],
    targets: Sequence[str],
    top_k: int,
    context: TaskContext,
    *,
    many: bool,
) -> PreparedRequest[TokenFilling]:
    """Prepare texts whose masks tokens fill.

    Args:
        ids: ids of each text, without special tokens; each has at least one mask.
        targets: the tokens to choose among; none: the whole vocabulary.
        top_k: most predictions per mask.
        context: the model.
        many: whether the inputs are a list.

    Raises:
        InvalidRequest: no target has a token in the vocabulary.
    """
    target_ids, warnings = _target_ids(context.tokenizer, targets)
    encodings = _encodings(ids, 0 if target_ids else top_k, target_ids, context)
    return PreparedRequest(encodings, TokenFilling(encodings, top_k, many), warnings=warnings)


def prepare_originals(
    ids: Sequence[Sequence[int]],
    originals: Sequence[str],
    top_k: int,
    context: TaskContext,
    *,
    many: bool,
) -> PreparedRequest[TokenFilling]:
    """Prepare texts with one mask each, whose original token is known; see `prepare_tokens`.

    The graph returns the logit of every token, so that the rank can be counted.

    Raises:
        EmptyRequest: an original is empty.
        InvalidRequest: there are too many texts, an original is not one token, or there is not one
            per text.
    """
    tokenizer = context.tokenizer
    if len(originals) != len(ids):
        raise InvalidRequest(
            f"original has {len(originals)} words, but inputs has {len(ids)} texts"
        )
    if len(ids) > _MOST_RANKED:
        raise InvalidRequest(f"original takes at most {_MOST_RANKED} texts, got {len(ids)}")
    tokens = []
    for index, (text, original) in enumerate(zip(ids, originals, strict=True)):
        check_text(original, Location(("original",)), context.limits)
        pieces = tokenizer.ids([original])[0]
        if len(pieces) != 1 or pieces[0] == tokenizer.unknown_id:
            shown = ascii(original)[:80]
            raise InvalidRequest(f"original {shown} is not a token of the vocabulary")
        masks = len(tokenizer.mask_positions(text))
        if masks > 1:
            name = input_name(index, many=many)
            raise InvalidRequest(f"holds {masks} mask tokens; original takes texts with 1", name)
        tokens.append(pieces[0])
    encodings = _encodings(ids, top_k, list(range(tokenizer.vocab_size)), context)
    return PreparedRequest(encodings, TokenFilling(encodings, top_k, many, tokens))


def _encodings(
    ids: Sequence[Sequence[int]], top_k: int, targets: Sequence[int], context: TaskContext
) -> list[Encoding]:
    tokenizer = context.tokenizer
    encodings = []
    for text in ids:
        encoding, _ = tokenizer.encode(text, context.limits.max_tokens)
        positions = np.flatnonzero(encoding.input_ids == tokenizer.mask_id).tolist()
        request = masked_lm.MaskedLMRequest(positions, top_k, targets)
        encoding.requests = {masked_lm.HEAD.name: request}
        encodings.append(encoding)
    return encodings


def _original(tokenizer: Tokenizer, result: masked_lm.MaskedLMResult, token: int) -> OriginalToken:
    """Return the place of a token among the logits [1, V] of a mask."""
    logits = result.target_logits[0]
    score = float(np.exp(logits[token] - result.logsumexp[0]))
    rank = 1 + int((logits > logits[token]).sum())
    return OriginalToken(token, tokenizer.decode([[token]])[0], score, rank)


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


def _predictions(
    tokenizer: Tokenizer,
    encoding: Encoding,
    result: masked_lm.MaskedLMResult,
    top_k: int,
    targets: Sequence[int],
) -> list[list[Prediction]]:
    """Return the predictions for each mask of a text, among the targets or all tokens."""
    sequence = encoding.input_ids.tolist()
    positions = np.flatnonzero(encoding.input_ids == tokenizer.mask_id).tolist()
    masks = []
    for mask, position in enumerate(positions):
        if targets:
            logits = result.target_logits[mask]  # [n]
            best = np.argsort(-logits, kind="stable")[:top_k]
            logits, tokens = logits[best], [targets[choice] for choice in best]
        else:
            logits, tokens = result.top_logits[mask], result.top_ids[mask].tolist()  # [k]
        scores = np.exp(logits - result.logsumexp[mask]).tolist()
        filled = [[*sequence[:position], token, *sequence[position + 1 :]] for token in tokens]
        # If a text has several masks, the sequences keep the other masks and all special tokens,
        # as in transformers.
        texts = tokenizer.decode(filled, skip_special_tokens=len(positions) == 1)
        words = tokenizer.decode([[token] for token in tokens])
        predictions = zip(scores, tokens, words, texts, strict=True)
        masks.append([Prediction(*prediction) for prediction in predictions])
    return masks
