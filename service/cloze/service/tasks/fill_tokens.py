"""Fill-mask of each mask by itself, with tokens or with words of several sub-tokens.

The score of a token is its softmax over the whole vocabulary, also if the request names targets.

The score of a word of n sub-tokens is the product of n probabilities: that of each sub-token, in
the place of n masks, after the sub-tokens before it. A word of one sub-token thus has the score
that it has as a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from cloze.model_store.heads import masked_lm
from cloze.model_store.sequences import TEXT_TOKENS
from cloze.service.core import Float32
from cloze.service.errors import InvalidRequest, Location, TooMany, quoted
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


@dataclass(frozen=True, slots=True)
class WordPrediction:
    """A word for one mask, with the ids of its sub-tokens."""

    score: float
    tokens: list[int]
    token_str: str
    sequence: str


Masks = (
    list[Prediction] | list[list[Prediction]] | list[WordPrediction] | list[list[WordPrediction]]
)
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
class MaskFilling:
    """The state of a request that fills each mask by itself.

    Attributes:
        texts: the ids of the texts, with special tokens.
        top_k: most predictions per mask.
        targets: the ids of each word to choose among; none: the tokens of the whole vocabulary.
        as_words: whether each sub-token of a target has an encoding of its own.
        originals: the token that stood at the only mask of each text; None: not asked for.
    """

    texts: Sequence[list[int]]
    top_k: int
    targets: Sequence[list[int]]
    as_words: bool = False
    originals: Sequence[int] | None = None

    def decode(self, outputs: Outputs, context: TaskContext) -> list[Any]:
        """Return the predictions for each text; one list per mask if a text has several."""
        results = iter(output[masked_lm.HEAD.name] for output in outputs)
        of_pieces = (result.target_log_probability() for result in results)
        answers: list[Any] = []
        for index, text in enumerate(self.texts):
            positions = context.tokenizer.mask_positions(text)
            result = None if self.as_words else next(results)
            masks = []
            for mask, position in enumerate(positions):
                words = self.targets
                if result is None:
                    logs = np.array([sum(islice(of_pieces, len(word))) for word in words])
                elif words:
                    logs = result.target_logits[mask] - result.logsumexp[mask]
                else:
                    words = [[token] for token in result.top_ids[mask].tolist()]
                    logs = result.top_log_probabilities(mask)
                masks.append(self._predictions(text, position, words, logs, context.tokenizer))
            if self.originals is None or result is None:
                answers.append(masks[0] if len(masks) == 1 else masks)
                continue
            token, logits = self.originals[index], result.target_logits[0]  # [V]
            score = float(np.exp(logits[token] - result.logsumexp[0]))
            rank = 1 + int((logits > logits[token]).sum())
            [word] = context.tokenizer.decode([[token]])
            answers.append(RankedOriginal(masks[0], OriginalToken(token, word, score, rank)))
        return answers

    def _predictions(
        self,
        text: list[int],
        position: int,
        words: Sequence[list[int]],
        logs: Float32,
        tokenizer: Tokenizer,
    ) -> list[Any]:
        """Return the best words for a mask, by the logarithms of their probabilities.

        If the mask is not alone in the text, the other masks and all special tokens stay in the
        text that is shown, as in transformers.
        """
        best = np.argsort(-logs, kind="stable")[: self.top_k]
        scores, words = np.exp(logs[best]).tolist(), [words[choice] for choice in best]
        filled = [[*text[:position], *word, *text[position + 1 :]] for word in words]
        is_alone = text.count(text[position]) == 1
        sequences = tokenizer.decode(filled, skip_special_tokens=is_alone)
        rows = zip(scores, words, tokenizer.decode(words), sequences, strict=True)
        if self.as_words:
            return [WordPrediction(*row) for row in rows]
        return [Prediction(score, token, *shown) for score, [token], *shown in rows]


def prepare_tokens(
    ids: Sequence[Input[Sequence[int]]],
    targets: Sequence[list[int]],
    top_k: int,
    originals: str | list[str] | None,
    context: TaskContext,
) -> PreparedRequest[MaskFilling]:
    """Prepare the ids of texts, without special tokens, whose masks tokens or targets fill.

    To count the rank of an original, the graph returns the logit of every token.
    """
    tokenizer = context.tokenizer
    tokens = None if originals is None else _original_tokens(ids, originals, context)
    logits_of = [token for [token] in targets]
    if originals is not None:
        logits_of = list(range(tokenizer.vocab_size))
    encodings = []
    for _, text in ids:
        positions = [1 + index for index in tokenizer.mask_positions(text)]  # after [CLS]
        request = masked_lm.MaskedLMRequest(positions, 0 if targets else top_k, logits_of)
        encodings.append(tokenizer.encode(text, {masked_lm.HEAD.name: request}))
    texts = [encoding.input_ids.tolist() for encoding in encodings]
    return PreparedRequest(encodings, MaskFilling(texts, top_k, targets, originals=tokens))


def prepare_words(
    ids: Sequence[Input[Sequence[int]]],
    words: Sequence[list[int]],
    top_k: int,
    context: TaskContext,
) -> PreparedRequest[MaskFilling]:
    """Prepare the ids of texts whose masks words fill: one encoding per mask, word and sub-token.

    The texts have no special tokens, and room for the longest word.
    """
    tokenizer, limits = context.tokenizer, context.limits
    longest, pieces = max(map(len, words)), sum(map(len, words))
    places, tokens = [], 0
    for at, text in ids:
        masks = tokenizer.mask_positions(text)
        places += [(text, mask) for mask in masks]
        tokens += len(masks) * pieces * (len(text) + TEXT_TOKENS + longest - 1)
        limits.check_tokens(tokens, "the targets take", at)
    limits.check_results(len(places) * pieces, "the targets need")
    encodings = []
    for text, mask in places:
        for word in words:
            for known, token in enumerate(word):
                in_place = [*word[:known], *[text[mask]] * (len(word) - known)]
                request = masked_lm.MaskedLMRequest([1 + mask + known], targets=[token])
                filled = [*text[:mask], *in_place, *text[mask + 1 :]]
                encodings.append(tokenizer.encode(filled, {masked_lm.HEAD.name: request}))
    texts = [tokenizer.special.text(text) for _, text in ids]
    return PreparedRequest(encodings, MaskFilling(texts, top_k, words, as_words=True))


def _original_tokens(
    ids: Sequence[Input[Sequence[int]]], originals: str | list[str], context: TaskContext
) -> list[int]:
    """Return the token that stood at the only mask of each text."""
    tokenizer = context.tokenizer
    originals = [originals] if isinstance(originals, str) else originals
    if len(originals) != len(ids):
        problem = f"has {len(originals)} words, but inputs has {len(ids)} texts"
        raise InvalidRequest(problem, _ORIGINAL)
    if len(ids) > _MOST_RANKED:
        raise TooMany(f"takes at most {_MOST_RANKED} texts, got {len(ids)}", _ORIGINAL)
    tokens = []
    for (at, text), original in zip(ids, originals, strict=True):
        context.limits.checked(original, _ORIGINAL)
        pieces = tokenizer.ids([original])[0]
        if len(pieces) != 1 or pieces[0] == tokenizer.unknown_id:
            raise InvalidRequest(f"{quoted(original)} is not a token of the vocabulary", _ORIGINAL)
        if (masks := len(tokenizer.mask_positions(text))) > 1:
            raise InvalidRequest(f"holds {masks} mask tokens; original takes texts with 1", at)
        tokens.append(pieces[0])
    return tokens


def target_words(
    tokenizer: Tokenizer, targets: Sequence[str], *, whole: bool
) -> tuple[list[list[int]], tuple[str, ...]]:
    """Return the distinct ids of the targets, and warnings about those that are replaced or none.

    Whole words have all their sub-tokens; else the first one stands for a target of several.
    """
    words: dict[tuple[int, ...], None] = {}  # ordered
    warnings, no_word = [], {tokenizer.unknown_id, tokenizer.mask_id}
    for target, ids in zip(targets, tokenizer.ids(targets), strict=True):
        pieces = list(ids)
        if not whole and (token := tokenizer.id_of(target)) is not None:
            pieces = [token]
        elif not pieces or (whole and not no_word.isdisjoint(pieces)):
            warnings.append(f"target {target!a} is not in the vocabulary and was left out")
            continue
        elif not whole:
            pieces = pieces[:1]
            [piece] = tokenizer.decode([pieces])
            warnings.append(f"target {target!a} is not in the vocabulary; {piece!a} stands for it")
        words[tuple(pieces)] = None
    if targets and not words:
        raise InvalidRequest("none of the targets is a word of the model's vocabulary")
    return [list(word) for word in words], tuple(warnings)
