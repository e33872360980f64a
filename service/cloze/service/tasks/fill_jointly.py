"""Fill-mask of several masks at once: whole fillings of a text, with their joint probability.

- ``independent``: the probability of a filling is the product of each mask's own probabilities.
- ``left-to-right``: each mask gets its likeliest token, given the tokens of the masks before it.
  The first mask gets as many tokens as fillings are asked for.
- ``beam``: beam search of width `top_k`, at least 5, from left to right.

The last two multiply the probability of each token given those before it (the chain rule). They
take one round of the engine per mask.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from cloze.model_store.heads import masked_lm
from cloze.service.tasks.task import Input, Outputs, PreparedRequest, TaskContext
from cloze.service.text.tokenizer import Tokenizer

Method = Literal["independent", "left-to-right", "beam"]


@dataclass(frozen=True, slots=True)
class Filling:
    """Tokens for all masks of a text, with their joint probability."""

    score: float
    tokens: list[int]
    token_strs: list[str]
    sequence: str


class _Hypothesis(NamedTuple):
    """The tokens of the first masks, and the logarithm of their probability."""

    tokens: tuple[int, ...] = ()
    log_probability: float = 0.0


@dataclass(slots=True)
class _Text:
    """A text whose masks are being filled."""

    ids: list[int]  # ids of the text, without special tokens
    masks: list[int]  # positions of the masks in the ids
    # What fills the first masks, best first.
    hypotheses: list[_Hypothesis] = field(default_factory=lambda: [_Hypothesis()])

    def filled(self, hypothesis: _Hypothesis) -> list[int]:
        """Return the ids with the tokens of the first masks."""
        ids = list(self.ids)
        for position, token in zip(self.masks, hypothesis.tokens, strict=False):
            ids[position] = token
        return ids

    def extend(self, following: Sequence[list[tuple[int, float]]], count: int) -> None:
        """Keep the best hypotheses with one more mask, by the predictions that follow each."""
        extended = [
            _Hypothesis((*one.tokens, token), one.log_probability + log_probability)
            for one, predictions in zip(self.hypotheses, following, strict=True)
            for token, log_probability in predictions
        ]
        self.hypotheses = heapq.nlargest(count, extended, key=lambda one: one.log_probability)


@dataclass(frozen=True, slots=True)
class JointFilling:
    """The state of a request for `top_k` whole fillings per text.

    A text has at most `beam_width` hypotheses.
    """

    texts: Sequence[_Text]
    method: Method
    top_k: int
    beam_width: int

    def next_round(self, tokenizer: Tokenizer) -> PreparedRequest["JointFilling"] | None:
        """Return the next round of the engine; None if all masks are filled."""
        unfinished, encodings = [], []
        for text in self.texts:
            filled = len(text.hypotheses[0].tokens)
            positions = [1 + position for position in text.masks[filled:]]  # after [CLS]
            if not positions:
                continue
            unfinished.append(text)
            if self.method != "independent":
                positions = positions[:1]
            is_greedy = self.method == "left-to-right" and filled
            request = masked_lm.MaskedLMRequest(positions, 1 if is_greedy else self.beam_width)
            requests = {masked_lm.HEAD.name: request}
            encodings += [tokenizer.encode(text.filled(one), requests) for one in text.hypotheses]
        if not encodings:
            return None
        return PreparedRequest(encodings, self, advance=partial(self._advance, unfinished))

    def _advance(
        self, texts: Sequence[_Text], outputs: Outputs, context: TaskContext
    ) -> PreparedRequest["JointFilling"] | None:
        """Fill the next masks by the outputs of a round; return the next round, if there is one."""
        results = iter(output[masked_lm.HEAD.name] for output in outputs)
        width = self.beam_width
        for text in texts:
            if self.method != "independent":
                text.extend([_predictions(next(results), 0) for _ in text.hypotheses], width)
                continue
            result = next(results)
            for mask in range(len(text.masks)):
                # The hypothesis of rank i is in the best n only with tokens of rank n / (i + 1) or
                # better: all better hypotheses with all better tokens have greater products.
                likeliest = _predictions(result, mask)
                ranks = range(1, len(text.hypotheses) + 1)
                text.extend([likeliest[: width // rank] for rank in ranks], width)
        return self.next_round(context.tokenizer)

    def decode(self, _: Outputs, context: TaskContext) -> list[list[Filling]]:
        """Return the fillings of each text."""
        decode = context.tokenizer.decode
        results = []
        for text in self.texts:
            fillings = []
            for one in text.hypotheses[: self.top_k]:
                [sequence] = decode([text.filled(one)], skip_special_tokens=True)
                words = decode([[token] for token in one.tokens])
                score = math.exp(one.log_probability)
                fillings.append(Filling(score, list(one.tokens), words, sequence))
            results.append(fillings)
        return results


def prepare_jointly(
    ids: Sequence[Input[Sequence[int]]], method: Method, top_k: int, context: TaskContext
) -> PreparedRequest[JointFilling]:
    """Prepare the ids of texts, without special tokens, whose masks are filled together."""
    tokenizer, limits = context.tokenizer, context.limits
    beam_width = max(top_k, 5) if method == "beam" else top_k
    texts, results, tokens = [], 0, 0
    for at, text in ids:
        masks = tokenizer.mask_positions(text)
        texts.append(_Text(list(text), masks))
        rounds = 0 if method == "independent" else len(masks) - 1
        tokens += (len(text) + 2) * (1 + rounds * beam_width)
        limits.check_tokens(tokens, f"decode {method} takes", at)
        results += len(masks) * beam_width * (beam_width if method == "beam" else 1)
    limits.check_results(results, f"decode {method} compares")
    first = JointFilling(texts, method, top_k, beam_width).next_round(tokenizer)
    assert first is not None  # each text has a mask
    return first


def _predictions(result: masked_lm.MaskedLMResult, mask: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens of a mask, with the logarithms of their probabilities."""
    log_probabilities = result.top_log_probabilities(mask).tolist()
    return list(zip(result.top_ids[mask].tolist(), log_probabilities, strict=True))
