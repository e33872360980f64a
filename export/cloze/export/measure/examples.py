"""Cuts a corpus into training examples and makes the pairs of the sentence objective.

Each example is a function of (seed, epoch, its number), so a resumed run needs no stored state.
Sources: Devlin et al. 2019, section 3.1 (next sentence); Lan et al. 2020, "ALBERT", section 3.1
(sentence order).
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from cloze.export.errors import TrainError
from cloze.export.measure.corpus import Corpus
from cloze.model_store.sequences import TEXT_TOKENS, SpecialTokens

Tokens = NDArray[np.unsignedinteger]


class SentenceObjective(StrEnum):
    """The prediction about two texts: next sentence, sentence order, or none."""

    NSP = "nsp"
    SOP = "sop"
    NONE = "none"


IS_NEXT, NOT_NEXT = 0, 1
"""Labels in the order of BERT's two logits. For sentence order: 0 in order, 1 swapped."""

UNPAIRED = -100
"""Label of a single sentence beside pairs; `torch.nn.functional.cross_entropy` ignores it."""


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """One sequence before masking, special tokens included.

    Attributes:
        input_ids: int64 [S].
        token_type_ids: int64 [S].
        first_tokens: number of tokens of the first text, and of the special tokens around it.
        label: `IS_NEXT`, `NOT_NEXT` or `UNPAIRED`; None without a sentence objective.
    """

    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    first_tokens: int
    label: int | None


def join_texts(
    special: SpecialTokens, first: Tokens, second: Tokens | None, label: int | None
) -> TrainingExample:
    """Join one or two texts with special tokens."""
    first_tokens = len(first) + TEXT_TOKENS
    if second is None:
        ids, types = special.text(first), np.zeros(first_tokens, np.int32)
    else:
        ids, types = special.pair(first, second), special.pair_types(len(first), len(second))
    return TrainingExample(np.array(ids, np.int64), types.astype(np.int64), first_tokens, label)


@dataclass(frozen=True, slots=True)
class ExampleOptions:
    """How one epoch cuts a corpus into training examples.

    Attributes:
        length: maximum tokens per example, special tokens included.
        epoch: number of the epoch; each epoch cuts and pairs the text differently.
        short: share of examples that are cut to a random length, as in google-research/bert, so
            that the model also learns short texts.
        single: share of examples that are one sentence.
    """

    length: int
    sentence: SentenceObjective
    special: SpecialTokens
    seed: int
    epoch: int
    short: float = 0.1
    single: float = 0.0


class EpochExamples:
    """The training examples of one epoch over a corpus, in random order.

    Raises:
        TrainError: the corpus is too small for the sentence objective.
    """

    def __init__(self, corpus: Corpus, options: ExampleOptions) -> None:
        if not corpus.document_count:
            raise TrainError(
                "no document is left on this side of the split by titles; "
                "change held_out or give more documents"
            )
        self._corpus, self._options = corpus, options
        rng = np.random.default_rng([options.seed, options.epoch])
        pairs_texts = options.sentence is not SentenceObjective.NONE
        special_tokens = options.special.pair_tokens if pairs_texts else TEXT_TOKENS
        max_text_tokens = options.length - special_tokens
        segments, document_of = _cut(corpus, max_text_tokens, options.short, rng)
        if pairs_texts:
            divisible = segments[:, 1] - segments[:, 0] >= 2
            segments, document_of = segments[divisible], document_of[divisible]
        self._segments, self._document_of = segments, document_of
        if not len(segments):
            raise TrainError("the text is too short to make a single pair of sentences of it")
        if options.sentence is SentenceObjective.NSP and document_of[0] == document_of[-1]:
            raise TrainError(
                "next-sentence prediction needs at least 2 documents to draw random second "
                'sentences from; give more, or choose sentence = "sop" or "none"'
            )
        self._order = rng.permutation(len(segments))

    def __len__(self) -> int:
        return len(self._order)

    def rng(self, number: int) -> np.random.Generator:
        """Return the generator of all random draws for an example."""
        segment = int(self._order[number])
        return np.random.default_rng([self._options.seed, self._options.epoch, 1 + segment])

    def make(self, number: int, rng: np.random.Generator) -> TrainingExample:
        """Return the example with this number in the epoch's random order."""
        segment = int(self._order[number])
        start, end = self._segments[segment]
        tokens, sentence = self._corpus.tokens, self._options.sentence
        special, single = self._options.special, self._options.single
        is_single = single > 0 and rng.random() < single
        if is_single:
            sentences = self._corpus.sentences
            end = min(int(sentences[np.searchsorted(sentences, start + 1)]), end)
        if is_single or sentence is SentenceObjective.NONE:
            label = None if sentence is SentenceObjective.NONE else UNPAIRED
            return join_texts(special, tokens[start:end], None, label)
        at_sentence, cut = self._split_position(start + 1, end, rng)
        first, second = tokens[start:cut], tokens[cut:end]
        if rng.random() < 0.5:
            return join_texts(special, first, second, IS_NEXT)
        if sentence is SentenceObjective.SOP:
            return join_texts(special, second, first, NOT_NEXT)
        other = self._text_of_other_document(segment, len(second), at_sentence, rng)
        return join_texts(special, first, other, NOT_NEXT)

    def _split_position(self, start: int, end: int, rng: np.random.Generator) -> tuple[bool, int]:
        """Return whether a sentence starts in a range, and a random position, of a start if so."""
        low, high = np.searchsorted(self._corpus.sentences, [start, end])
        if high > low:
            return True, int(self._corpus.sentences[rng.integers(low, high)])
        return False, int(rng.integers(start, end))

    def _text_of_other_document(
        self, segment: int, size: int, at_sentence: bool, rng: np.random.Generator
    ) -> Tokens:
        """Return text of another document, as a random second text of about ``size`` tokens.

        The text starts with a sentence if and only if the true second text does. Otherwise the
        start of the second text would reveal the label.
        """
        corpus, other = self._corpus, segment
        while self._document_of[other] == self._document_of[segment]:
            other = int(rng.integers(len(self._segments)))
        start, end = self._segments[other]
        if at_sentence:
            _, start = self._split_position(start, end, rng)
        else:
            start = int(rng.integers(start + 1, end))
        document_end = int(corpus.sentences[corpus.documents[self._document_of[other] + 1]])
        return corpus.tokens[start : min(start + size, document_end)]


def _cut(
    corpus: Corpus, max_tokens: int, short: float, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut every document into segments of ``max_tokens`` tokens.

    A segment starts with a sentence where possible: if a segment ends inside a sentence, the next
    segment starts at the start of this sentence. No text is lost, and padding stays small.

    Returns:
        int64 [N, 2], first token and end of each segment; int64 [N], its document.
    """
    segments, document_of = [], []
    sentences = corpus.sentences
    for document in range(corpus.document_count):
        start = int(sentences[corpus.documents[document]])
        end = int(sentences[corpus.documents[document + 1]])
        while start < end:
            size = int(rng.integers(2, max_tokens + 1)) if rng.random() < short else max_tokens
            stop = min(start + size, end)
            segments.append((start, stop))
            document_of.append(document)
            sentence_start = int(sentences[np.searchsorted(sentences, stop, "right") - 1])
            start = sentence_start if start < sentence_start and stop < end else stop
    return np.asarray(segments, np.int64).reshape(-1, 2), np.asarray(document_of, np.int64)
