"""Fill-mask of each mask by itself, with tokens or with words of several sub-tokens.

The score of a token is its softmax over the whole vocabulary, also if the request names targets.

The score of a word of n sub-tokens is the product of n probabilities: that of each sub-token, in
the place of n masks, after the sub-tokens before it. A word of one sub-token thus has the score
that it has as a token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import masked_lm
from cloze.model_store.heads.masked_lm import MaskedLMRequest
from cloze.service.core import InvalidRequest, Location
from cloze.service.tasks.long_text import TokenBudget
from cloze.service.tasks.task import (
    Input,
    PreparedRequest,
    TaskContext,
    check_results,
    check_text,
)
from cloze.service.tokenizer import Tokenizer

_MOST_RANKED: Final = 64
"""Most texts of a request whose original tokens are ranked, for each needs V numbers."""


_ORIGINAL: Final = Location(("original",))


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
        originals: the token that stood at the only mask of each text; None: not asked for.
    """

    encodings: Sequence[Encoding]
    top_k: int
    originals: Sequence[int] | None = None

    def decode(self, outputs: Sequence[HeadOutputs], context: TaskContext) -> Any:
        """Return the predictions for each text."""
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
        return results


def prepare_tokens(
    ids: Sequence[Input[Sequence[int]]],
    targets: Sequence[str],
    top_k: int,
    context: TaskContext,
) -> PreparedRequest[TokenFilling]:
    """Prepare texts whose masks tokens fill.

    Args:
        ids: ids of each text, without special tokens; each has at least one mask.
        targets: the tokens to choose among; none: the whole vocabulary.
        top_k: most predictions per mask.
        context: the model.

    Raises:
        InvalidRequest: no target has a token in the vocabulary.
    """
    target_ids, warnings = _target_ids(context.tokenizer, targets)
    encodings = _encodings(ids, 0 if target_ids else top_k, target_ids, context)
    return PreparedRequest(encodings, TokenFilling(encodings, top_k), warnings=warnings)


def prepare_originals(
    ids: Sequence[Input[Sequence[int]]],
    originals: Sequence[str],
    top_k: int,
    context: TaskContext,
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
            f"has {len(originals)} words, but inputs has {len(ids)} texts", _ORIGINAL
        )
    if len(ids) > _MOST_RANKED:
        raise InvalidRequest(f"takes at most {_MOST_RANKED} texts, got {len(ids)}", _ORIGINAL)
    tokens = []
    for (at, text), original in zip(ids, originals, strict=True):
        check_text(original, _ORIGINAL, context.limits)
        pieces = tokenizer.ids([original])[0]
        if len(pieces) != 1 or pieces[0] == tokenizer.unknown_id:
            shown = ascii(original)[:80]
            raise InvalidRequest(f"{shown} is not a token of the vocabulary", _ORIGINAL)
        masks = len(tokenizer.mask_positions(text))
        if masks > 1:
            raise InvalidRequest(f"holds {masks} mask tokens; original takes texts with 1", at)
        tokens.append(pieces[0])
    encodings = _encodings(ids, top_k, list(range(tokenizer.vocab_size)), context)
    return PreparedRequest(encodings, TokenFilling(encodings, top_k, tokens))


def _encodings(
    ids: Sequence[Input[Sequence[int]]],
    top_k: int,
    targets: Sequence[int],
    context: TaskContext,
) -> list[Encoding]:
    tokenizer = context.tokenizer
    encodings = []
    for _, text in ids:
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


# ---- words ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WordPrediction:
    """A word for one mask, with the ids of its sub-tokens."""

    score: float
    tokens: list[int]
    token_str: str
    sequence: str


Words = list[WordPrediction] | list[list[WordPrediction]]
"""The words for one text, best first; one list per mask if the text has several masks."""


@dataclass(frozen=True, slots=True)
class _Text:
    """The ids of a text with special tokens, and the positions of its masks."""

    ids: list[int]
    masks: list[int]


class WordFilling:
    """The state of a request whose targets are words.

    Args:
        texts: the texts.
        words: ids of the sub-tokens of each word, without repetition.
        top_k: most words per mask in the result.
    """

    def __init__(self, texts: Sequence[_Text], words: Sequence[list[int]], top_k: int) -> None:
        self._texts, self._words, self._top_k = texts, words, top_k

    def encodings(self, tokenizer: Tokenizer) -> list[Encoding]:
        """Return one encoding per text, mask, word and sub-token."""
        return [
            _word_encoding(tokenizer, text, mask, word, known)
            for text in self._texts
            for mask in text.masks
            for word in self._words
            for known in range(len(word))
        ]

    def decode(self, outputs: Sequence[HeadOutputs], context: TaskContext) -> list[Words]:
        """Return the words for each text."""
        results = iter(output[masked_lm.HEAD.name] for output in outputs)
        answers: list[Words] = []
        for text in self._texts:
            masks = []
            for mask in text.masks:
                scores = [
                    sum(next(results).target_log_probability() for _ in word)
                    for word in self._words
                ]
                masks.append(self._best(text, mask, scores, context.tokenizer))
            answers.append(masks[0] if len(masks) == 1 else masks)
        return answers

    def _best(
        self, text: _Text, mask: int, scores: Sequence[float], tokenizer: Tokenizer
    ) -> list[WordPrediction]:
        """Return the best words; the scores are logarithms of probabilities."""
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: self._top_k]
        words = [self._words[index] for index in order]
        filled = [[*text.ids[:mask], *word, *text.ids[mask + 1 :]] for word in words]
        only_one = len(text.masks) == 1
        return [
            WordPrediction(math.exp(scores[index]), word, string, sequence)
            for index, word, string, sequence in zip(
                order,
                words,
                tokenizer.decode(words),
                tokenizer.decode(filled, skip_special_tokens=only_one),
                strict=True,
            )
        ]


def prepare_words(
    ids: Sequence[Input[Sequence[int]]],
    words: "VocabularyWords",
    top_k: int,
    context: TaskContext,
) -> PreparedRequest[WordFilling]:
    """Prepare texts whose masks words fill.

    Args:
        ids: ids of each text, without special tokens; each has at least one mask, and room for the
            longest word.
        words: the words.
        top_k: most words per mask in the result.
        context: the model.

    Raises:
        InvalidRequest: all texts have more tokens than a request may have.
    """
    tokenizer, limits = context.tokenizer, context.limits
    longest, pieces = words.longest, sum(map(len, words.ids))
    budget = TokenBudget(limits, "the targets take")
    texts = []
    for at, text in ids:
        size = len(text) + 2 + longest - 1
        whole = tokenizer.special.text(text)
        masks = tokenizer.mask_positions(whole)
        texts.append(_Text(whole, masks))
        budget.add(len(masks) * pieces * size, at)
    count = sum(len(text.masks) for text in texts) * pieces
    check_results(count, "the targets need", limits)
    state = WordFilling(texts, words.ids, top_k)
    encodings = state.encodings(tokenizer)
    return PreparedRequest(encodings, state, results=len(encodings), warnings=words.warnings)


@dataclass(frozen=True, slots=True)
class VocabularyWords:
    """The targets that the vocabulary has tokens for.

    Attributes:
        ids: the sub-tokens of each word, without repetition; at least one word.
        warnings: which targets are left out.
    """

    ids: list[list[int]]
    warnings: tuple[str, ...]

    @property
    def longest(self) -> int:
        """Number of sub-tokens of the longest word."""
        return max(map(len, self.ids))


def vocabulary_words(tokenizer: Tokenizer, targets: Sequence[str]) -> VocabularyWords:
    """Return the targets that are words of the vocabulary.

    Raises:
        InvalidRequest: no target is one.
    """
    words: dict[tuple[int, ...], None] = {}  # ordered
    warnings = []
    for target, ids in zip(targets, tokenizer.ids(targets), strict=True):
        if not ids or tokenizer.unknown_id in ids or tokenizer.mask_id in ids:
            warnings.append(f"target {target!a} is not in the vocabulary and was left out")
        else:
            words[tuple(ids)] = None
    if not words:
        raise InvalidRequest("none of the targets is a word of the model's vocabulary")
    return VocabularyWords([list(word) for word in words], tuple(warnings))


def _word_encoding(
    tokenizer: Tokenizer, text: _Text, mask: int, word: Sequence[int], known: int
) -> Encoding:
    """Return a text whose mask stands for a word, of which some sub-tokens are known."""
    assert tokenizer.mask_id is not None  # a model with the head has the token
    place = [*word[:known], *[tokenizer.mask_id] * (len(word) - known)]
    ids = [*text.ids[1:mask], *place, *text.ids[mask + 1 : -1]]
    encoding, _ = tokenizer.encode(ids, len(ids) + 2)
    request = MaskedLMRequest([mask + known], targets=[word[known]])
    encoding.requests = {masked_lm.HEAD.name: request}
    return encoding
