"""Cuts a corpus into sequences for the model, and makes the pairs of the sentence objective. Knows no torch.

Every sequence is a function of (seed, epoch, its number): nothing has to be remembered to go on after a stop.
Sources: Devlin et al. 2019, section 3.1 (next sentence); Lan et al. 2020, "ALBERT", section 3.1 (sentence order).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from export.train.corpus import Corpus
from export.train.errors import TrainError
from export.train.sampling import sampled_order, sampling_shares
from export.train.vocabulary import SpecialIds


class Sentence(StrEnum):
    """The question asked about two texts."""

    NSP = "nsp"
    SOP = "sop"
    NONE = "none"


IS_NEXT, NOT_NEXT = 0, 1
"""The labels, in the order of BERT's two logits. For sentence order: 0 in order, 1 swapped."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """What one row of a batch is made of, special tokens included.

    Attributes:
        input_ids: int64 [S].
        token_type_ids: int64 [S].
        label: `IS_NEXT` or `NOT_NEXT`; None without a sentence objective.
    """

    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    label: int | None


class Sequences:
    """The sequences of one epoch over a corpus.

    Args:
        corpus: the text.
        length: tokens a sequence has at most, special ones included.
        sentence: the sentence objective.
        special: of the vocabulary.
        seed: of everything that is drawn.
        epoch: which pass; each cuts the text at other places.
        short: the share of sequences that are cut to a random length, as in the paper, so that short texts are known too.
        weights: sampling weights, see `sampling_shares`; empty: every text is read alike often.

    Raises:
        TrainError: the corpus cannot give what the sentence objective needs, or a weight does not apply to it.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        length: int,
        sentence: Sentence,
        special: SpecialIds,
        seed: int,
        epoch: int,
        short: float = 0.1,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if not corpus.document_count:
            raise TrainError(
                "no document is left on this side of the split by titles; change held_out or give more documents"
            )
        if sentence is Sentence.NSP and corpus.document_count < 2:
            raise TrainError("next-sentence prediction needs at least 2 documents to draw random second sentences from; "
                             'give more, or choose sentence = "sop" or "none"')  # fmt: skip
        self._corpus, self._sentence = corpus, sentence
        self._special = special
        self._seed, self._epoch = seed, epoch
        self._room = length - (2 if sentence is Sentence.NONE else 3)
        rng = np.random.default_rng([seed, epoch])
        self._segments, self._document_of = _cut(corpus, self._room, short, rng)
        if sentence is not Sentence.NONE:
            long_enough = self._segments[:, 1] - self._segments[:, 0] >= 2
            self._segments, self._document_of = (
                self._segments[long_enough],
                self._document_of[long_enough],
            )
        if not len(self._segments) or (
            sentence is Sentence.NSP and self._document_of[0] == self._document_of[-1]
        ):
            raise TrainError("the text is too short to make a single pair of sentences of it")
        if weights:
            group_of, shares = sampling_shares(corpus, weights)
            self._order = sampled_order(group_of[self._document_of], shares, rng)
        else:
            self._order = rng.permutation(len(self._segments))
        self._drawn = np.sort(self._order)  # what random second texts are drawn from
        if (
            sentence is Sentence.NSP
            and self._document_of[self._drawn[0]] == self._document_of[self._drawn[-1]]
        ):
            raise TrainError(
                "the corpus weights leave text of one document, but next-sentence prediction needs at least 2"
            )

    def __len__(self) -> int:
        return len(self._order)

    def rng(self, number: int) -> np.random.Generator:
        """The source of everything that is drawn for a sequence."""
        return np.random.default_rng([self._seed, self._epoch, 1 + int(self._order[number])])

    def document(self, number: int) -> int:
        """Of which document the (first) text is."""
        return int(self._document_of[self._order[number]])

    def start(self, number: int) -> int:
        """Where in the corpus' tokens the sequence was cut from."""
        return int(self._segments[self._order[number], 0])

    def make(self, number: int, rng: np.random.Generator) -> Sequence:
        """The sequence of this number, in the epoch's random order."""
        segment = int(self._order[number])
        start, end = self._segments[segment]
        if self._sentence is Sentence.NONE:
            return self._join(self._corpus.tokens[start:end], None, None)
        between_sentences, cut = self._split(start, end, rng)
        first, second = self._corpus.tokens[start:cut], self._corpus.tokens[cut:end]
        if rng.random() < 0.5:
            return self._join(first, second, IS_NEXT)
        if self._sentence is Sentence.SOP:
            return self._join(second, first, NOT_NEXT)
        return self._join(
            first, self._elsewhere(segment, len(second), between_sentences, rng), NOT_NEXT
        )

    def _split(self, start: int, end: int, rng: np.random.Generator) -> tuple[bool, int]:
        """Where the first text ends: between two sentences if there are two (then True), else anywhere inside."""
        sentences = self._corpus.sentences
        low, high = np.searchsorted(sentences, [start + 1, end])
        return (
            (True, int(sentences[rng.integers(low, high)]))
            if high > low
            else (False, int(rng.integers(start + 1, end)))
        )

    def _elsewhere(
        self, segment: int, wanted: int, at_sentence: bool, rng: np.random.Generator
    ) -> NDArray[np.unsignedinteger]:
        """Text of another document, of about the length of what it stands for.

        It begins with a sentence just when what it stands for does: else how a text begins would tell which it is.
        """
        while True:
            other = int(self._drawn[rng.integers(len(self._drawn))])
            if self._document_of[other] != self._document_of[segment]:
                break
        start, end = self._segments[other]
        low, high = np.searchsorted(self._corpus.sentences, [start, end])
        begins = at_sentence and high > low
        start = (
            int(self._corpus.sentences[rng.integers(low, high)])
            if begins
            else int(rng.integers(start + 1, end))
        )
        document_end = self._corpus.sentences[self._corpus.documents[self._document_of[other] + 1]]
        return self._corpus.tokens[start : min(start + wanted, int(document_end))]

    def _join(
        self,
        first: NDArray[np.unsignedinteger],
        second: NDArray[np.unsignedinteger] | None,
        label: int | None,
    ) -> Sequence:
        pieces: list[ArrayLike] = [[self._special.cls], first, [self._special.sep]]
        types = np.zeros(len(first) + 2 + (0 if second is None else len(second) + 1), np.int64)
        if second is not None:
            pieces += [second, [self._special.sep]]
            types[len(first) + 2 :] = 1
        return Sequence(np.concatenate(pieces).astype(np.int64), types, label)


def _cut(
    corpus: Corpus, room: int, short: float, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every document from its start to its end, in pieces of ``room`` tokens that begin with a sentence if they can.

    A sentence that the end cuts off begins the next piece, so no text is lost and no row is padded without need.

    Returns:
        int64 [N, 2] first token and end of each piece; int64 [N] its document.
    """
    segments, owners = [], []
    sentences = corpus.sentences
    for document in range(corpus.document_count):
        start = int(sentences[corpus.documents[document]])
        end = int(sentences[corpus.documents[document + 1]])
        while start < end:
            stop = min(
                start + (int(rng.integers(2, room + 1)) if rng.random() < short else room), end
            )
            segments.append((start, stop))
            owners.append(document)
            begun = int(sentences[np.searchsorted(sentences, stop, "right") - 1])
            start = begun if start < begun and stop < end else stop
    return np.asarray(segments, np.int64).reshape(-1, 2), np.asarray(owners, np.int64)
