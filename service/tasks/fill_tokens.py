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

from cloze.model_store.batch import Encoding
from cloze.model_store.heads import masked_lm
from cloze.model_store.heads.masked_lm import MaskedLMRequest, MaskedLMResult
from cloze.service.core import InvalidRequest, Location, quoted
from cloze.service.tasks.task import Input, Outputs, PreparedRequest, TaskContext
from cloze.service.text.tokenizer import Tokenizer

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
        targets: ids of the tokens to choose among; none: the whole vocabulary.
        originals: the token that stood at the only mask of each text; None: not asked for.
    """

    encodings: Sequence[Encoding]
    top_k: int
    targets: Sequence[int] = ()
    originals: Sequence[int] | None = None

    def decode(self, outputs: Outputs, context: TaskContext) -> Any:
        """Return the predictions for each text."""
        tokenizer = context.tokenizer
        results: list[Masks | RankedOriginal] = []
        for index, (encoding, output) in enumerate(zip(self.encodings, outputs, strict=True)):
            result: MaskedLMResult = output[masked_lm.HEAD.name]
            masks = self._predictions(tokenizer, encoding.input_ids.tolist(), result)
            if self.originals is None:
                results.append(masks[0] if len(masks) == 1 else masks)
                continue
            token, logits = self.originals[index], result.target_logits[0]  # [V]
            score = float(np.exp(logits[token] - result.logsumexp[0]))
            rank = 1 + int((logits > logits[token]).sum())
            [word] = tokenizer.decode([[token]])
            results.append(RankedOriginal(masks[0], OriginalToken(token, word, score, rank)))
        return results

    def _predictions(
        self, tokenizer: Tokenizer, sequence: list[int], result: MaskedLMResult
    ) -> list[list[Prediction]]:
        """Return the predictions for each mask of a text."""
        positions = tokenizer.mask_positions(sequence)
        masks = []
        for mask, position in enumerate(positions):
            if self.targets:
                logits = result.target_logits[mask]  # [n]
                best = np.argsort(-logits, kind="stable")[: self.top_k]
                logits, tokens = logits[best], [self.targets[choice] for choice in best]
            else:
                logits, tokens = result.top_logits[mask], result.top_ids[mask].tolist()  # [k]
            scores = np.exp(logits - result.logsumexp[mask]).tolist()
            words = [[token] for token in tokens]
            shown = _shown(tokenizer, sequence, position, words, alone=len(positions) == 1)
            masks.append(
                [
                    Prediction(score, token, word, text)
                    for score, token, (word, text) in zip(scores, tokens, shown, strict=True)
                ]
            )
        return masks


def _shown(
    tokenizer: Tokenizer,
    sequence: Sequence[int],
    mask: int,
    words: Sequence[list[int]],
    *,
    alone: bool,
) -> list[tuple[str, str]]:
    """Return each word as text, and the text with the word at a mask.

    The sequence has the special tokens. If the mask is not alone in the text, the other masks and
    all special tokens stay, as in transformers.
    """
    filled = [[*sequence[:mask], *word, *sequence[mask + 1 :]] for word in words]
    texts = tokenizer.decode(filled, skip_special_tokens=alone)
    return list(zip(tokenizer.decode(words), texts, strict=True))


def prepare_tokens(
    ids: Sequence[Input[Sequence[int]]],
    top_k: int,
    context: TaskContext,
    *,
    targets: Sequence[int] = (),
    originals: Sequence[int] | None = None,
) -> PreparedRequest[TokenFilling]:
    """Prepare texts whose masks tokens fill: one of the targets, if there are any.

    Each text is its ids without special tokens, and has at least one mask. To count the rank of an
    original, the graph returns the logit of every token.
    """
    tokenizer = context.tokenizer
    logits_of = targets if originals is None else list(range(tokenizer.vocab_size))
    encodings = []
    for _, text in ids:
        positions = [1 + index for index in tokenizer.mask_positions(text)]  # after [CLS]
        request = MaskedLMRequest(positions, 0 if targets else top_k, logits_of)
        encodings.append(tokenizer.encode(text, {masked_lm.HEAD.name: request}))
    return PreparedRequest(encodings, TokenFilling(encodings, top_k, targets, originals))


def original_tokens(
    ids: Sequence[Input[Sequence[int]]], originals: str | list[str], context: TaskContext
) -> list[int]:
    """Return the token that stood at the only mask of each text."""
    tokenizer = context.tokenizer
    originals = [originals] if isinstance(originals, str) else originals
    if len(originals) != len(ids):
        raise InvalidRequest(
            f"has {len(originals)} words, but inputs has {len(ids)} texts", _ORIGINAL
        )
    if len(ids) > _MOST_RANKED:
        raise InvalidRequest(f"takes at most {_MOST_RANKED} texts, got {len(ids)}", _ORIGINAL)
    tokens = []
    for (at, text), original in zip(ids, originals, strict=True):
        context.limits.checked(original, _ORIGINAL)
        pieces = tokenizer.ids([original])[0]
        if len(pieces) != 1 or pieces[0] == tokenizer.unknown_id:
            shown = quoted(original)
            raise InvalidRequest(f"{shown} is not a token of the vocabulary", _ORIGINAL)
        if (masks := len(tokenizer.mask_positions(text))) > 1:
            raise InvalidRequest(f"holds {masks} mask tokens; original takes texts with 1", at)
        tokens.append(pieces[0])
    return tokens


def target_tokens(
    tokenizer: Tokenizer, targets: Sequence[str]
) -> tuple[list[int], tuple[str, ...]]:
    """Return the distinct ids of the targets, and warnings about targets that are not one token."""
    tokens: dict[int, None] = {}  # ordered
    warnings = []
    for target in targets:
        token = tokenizer.id_of(target)
        if token is None:
            pieces = tokenizer.ids([target])[0]
            if not pieces:
                warnings.append(f"target {target!a} is not in the vocabulary and was left out")
                continue
            token = pieces[0]
            piece = tokenizer.decode([[token]])[0]
            warnings.append(f"target {target!a} is not in the vocabulary; {piece!a} stands for it")
        tokens[token] = None
    if targets and not tokens:
        raise InvalidRequest("none of the targets has a token in the model's vocabulary")
    return list(tokens), tuple(warnings)


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
class WordFilling:
    """The state of a request whose targets are words.

    Attributes:
        texts: the ids of the texts, with special tokens.
        words: the ids of each word's sub-tokens.
        top_k: most words per mask.
    """

    texts: Sequence[list[int]]
    words: Sequence[list[int]]
    top_k: int

    def decode(self, outputs: Outputs, context: TaskContext) -> list[Words]:
        """Return the words for each text."""
        results = iter(output[masked_lm.HEAD.name] for output in outputs)
        answers: list[Words] = []
        for text in self.texts:
            positions, masks = context.tokenizer.mask_positions(text), []
            for mask in positions:
                scores = [
                    sum(next(results).target_log_probability() for _ in word) for word in self.words
                ]
                order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
                order = order[: self.top_k]
                best = [(math.exp(scores[index]), self.words[index]) for index in order]
                words = [word for _, word in best]
                shown = _shown(context.tokenizer, text, mask, words, alone=len(positions) == 1)
                masks.append(
                    [WordPrediction(*one, *texts) for one, texts in zip(best, shown, strict=True)]
                )
            answers.append(masks[0] if len(masks) == 1 else masks)
        return answers


def prepare_words(
    ids: Sequence[Input[Sequence[int]]],
    words: Sequence[list[int]],
    top_k: int,
    context: TaskContext,
) -> PreparedRequest[WordFilling]:
    """Prepare texts whose masks words fill: one encoding per text, mask, word and sub-token.

    Each text is its ids without special tokens, has at least one mask, and room for the longest
    word. Each word is the ids of its sub-tokens.
    """
    tokenizer, limits = context.tokenizer, context.limits
    longest, pieces = max(map(len, words)), sum(map(len, words))
    texts, masks, tokens = [], [], 0
    for at, text in ids:
        texts.append(tokenizer.special.text(text))
        masks.append(tokenizer.mask_positions(texts[-1]))
        tokens += len(masks[-1]) * pieces * (len(texts[-1]) + longest - 1)
        limits.check_tokens(tokens, "the targets take", at)
    limits.check_results(sum(map(len, masks)) * pieces, "the targets need")
    encodings = [
        _word_encoding(tokenizer, text, mask, word, known)
        for text, positions in zip(texts, masks, strict=True)
        for mask in positions
        for word in words
        for known in range(len(word))
    ]
    return PreparedRequest(encodings, WordFilling(texts, words, top_k))


def target_words(
    tokenizer: Tokenizer, targets: Sequence[str]
) -> tuple[list[list[int]], tuple[str, ...]]:
    """Return the distinct sub-tokens of the targets, and warnings about those that are no words."""
    words: dict[tuple[int, ...], None] = {}  # ordered
    warnings = []
    for target, ids in zip(targets, tokenizer.ids(targets), strict=True):
        if not ids or tokenizer.unknown_id in ids or tokenizer.mask_id in ids:
            warnings.append(f"target {target!a} is not in the vocabulary and was left out")
        else:
            words[tuple(ids)] = None
    if not words:
        raise InvalidRequest("none of the targets is a word of the model's vocabulary")
    return [list(word) for word in words], tuple(warnings)


def _word_encoding(
    tokenizer: Tokenizer, text: Sequence[int], mask: int, word: Sequence[int], known: int
) -> Encoding:
    """Return a text whose mask stands for a word, of which some sub-tokens are known."""
    assert tokenizer.mask_id is not None  # a model with the head has the token
    in_place = [*word[:known], *[tokenizer.mask_id] * (len(word) - known)]
    request = MaskedLMRequest([mask + known], targets=[word[known]])
    ids = [*text[1:mask], *in_place, *text[mask + 1 : -1]]
    return tokenizer.encode(ids, {masked_lm.HEAD.name: request})
