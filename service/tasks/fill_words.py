"""Fill-mask with words as targets: a word may have several sub-tokens.

The score of a word of n sub-tokens is the product of n probabilities: that of each sub-token, in
the place of n masks, after the sub-tokens before it. A word of one sub-token thus has the score
that it has as a token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import masked_lm
from cloze.model_store.heads.masked_lm import MaskedLMRequest
from cloze.service.core import InvalidRequest
from cloze.service.tasks.task import PreparedRequest, TaskContext, check_results, input_name
from cloze.service.tokenizer import Tokenizer


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
        many: whether the inputs are a list.
    """

    def __init__(
        self, texts: Sequence[_Text], words: Sequence[list[int]], top_k: int, *, many: bool
    ) -> None:
        self._texts, self._words, self._top_k, self._many = texts, words, top_k, many

    def encodings(self, tokenizer: Tokenizer) -> list[Encoding]:
        """Return one encoding per text, mask, word and sub-token."""
        return [
            _encoding(tokenizer, text, mask, word, known)
            for text in self._texts
            for mask in text.masks
            for word in self._words
            for known in range(len(word))
        ]

    def decode(self, outputs: Sequence[HeadOutputs], context: TaskContext) -> Words | list[Words]:
        """Return the words for one text, or a list if the inputs are a list."""
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
        return answers if self._many else answers[0]

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
    ids: Sequence[Sequence[int]],
    words: "VocabularyWords",
    top_k: int,
    context: TaskContext,
    *,
    many: bool,
) -> PreparedRequest[WordFilling]:
    """Prepare texts whose masks words fill.

    Args:
        ids: ids of each text, without special tokens; each has at least one mask, and room for the
            longest word.
        words: the words.
        top_k: most words per mask in the result.
        context: the model.
        many: whether the inputs are a list.

    Raises:
        InvalidRequest: all texts have more tokens than a request may have.
    """
    tokenizer, limits = context.tokenizer, context.limits
    longest, pieces = words.longest, sum(map(len, words.ids))
    texts, tokens = [], 0
    for index, text in enumerate(ids):
        name, size = input_name(index, many=many), len(text) + 2 + longest - 1
        whole = tokenizer.special.text(text)
        masks = tokenizer.mask_positions(whole)
        texts.append(_Text(whole, masks))
        tokens += len(masks) * pieces * size
        if tokens > (most := limits.max_request_tokens):
            raise InvalidRequest(
                f"up to {name} the targets take {tokens} tokens; the limit of a request is {most}"
            )
    count = sum(len(text.masks) for text in texts) * pieces
    check_results(count, "the targets need", limits)
    state = WordFilling(texts, words.ids, top_k, many=many)
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


def _encoding(
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
