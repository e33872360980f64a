"""Entities of a text: its words, the sequence for some labels, and the entities of the logits.

The service and the quality gate share this module. All results are those of gliner 0.2.29.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cloze.model_store.heads.entities import EntityKind, EntityOptions, EntityRequest

_WORD: Final = re.compile(r"\w+(?:[-_]\w+)*|\S")

_BLOCK: Final = 1024
"""Candidates between two searches for those that clash with an entity."""

Floats = NDArray[np.float32]
Bounds = tuple[int, int]
"""First character or word, and the one after the last."""


def split_words(text: str) -> Iterator[Bounds]:
    """Yield the (start, end) characters of each word; a mark is a word."""
    return (match.span() for match in _WORD.finditer(text))


@dataclass(frozen=True, slots=True)
class EntityPrompt:
    """The start of the sequences for some labels.

    Attributes:
        ids: without the start token; the last one is the marker before the words. A bi-encoder has
            none.
        labels: positions of the rows of the labels in a sequence.
        vectors: of a bi-encoder, the vectors [l, d] of the labels.
    """

    ids: Sequence[int] = ()
    labels: Sequence[int] = ()
    vectors: Floats | None = None

    @classmethod
    def of(cls, labels: Sequence[Sequence[int]], options: EntityOptions) -> "EntityPrompt":
        """Return the prompt of labels by their token ids, unless the model is a bi-encoder."""
        assert options.ent_id is not None
        assert options.sep_id is not None
        ids: list[int] = []
        rows = []
        for label in labels:
            rows.append(1 + len(ids) + (not options.embed_ent_token))
            ids += [options.ent_id, *label]
        return cls([*ids, options.sep_id], tuple(rows))

    def sequence(self, words: Sequence[Sequence[int]]) -> tuple[list[int], EntityRequest]:
        """Return the ids of a sequence without its start and end token, and its request.

        Args:
            words: token ids of each word, at least one per word.
        """
        ids = list(self.ids)
        positions = []
        for word in words:
            positions.append(1 + len(ids))
            ids += word
        return ids, EntityRequest(tuple(positions), self.labels, self.vectors)


def fitting(words: Sequence[Sequence[int]], room: int) -> list[Sequence[int]]:
    """Return the words with tokens, by their ids, up to a number of tokens."""
    kept: list[Sequence[int]] = []
    for word in words:
        if (room := room - len(word)) < 0:
            break
        if word:
            kept.append(word)
    return kept


class Candidates(NamedTuple):
    """Spans of words that may be entities, in the order of gliner: arrays [n].

    Attributes:
        ends: the last word of each.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    labels: NDArray[np.int64]
    scores: Floats


def scores(logits: Floats, kind: EntityKind) -> Floats:
    """Return the scores of a text [w, k, l]; those of spans behind the last word are 0."""
    found = _sigmoid(logits)
    if kind is EntityKind.SPAN:
        words, width = found.shape[:2]
        found[np.add.outer(np.arange(words), np.arange(width)) >= words] = 0
    return found


def count_candidates(logits: Floats, threshold: float, kind: EntityKind) -> int:
    """Return an upper bound of the number of candidates, without listing them."""
    scores = _sigmoid(logits)
    if kind is EntityKind.SPAN:
        return int((scores > threshold).sum())
    return int(_word_runs(scores, threshold)[0].sum())


def find_candidates(logits: Floats, threshold: float, kind: EntityKind) -> Candidates:
    """Return the spans above a threshold, by the logits [w, k, l] of a text.

    Spans that end behind the last word are none.
    """
    scores = _sigmoid(logits)
    if kind is EntityKind.SPAN:
        starts, widths, labels = np.nonzero(scores > threshold)
        inside = starts + widths < len(scores)
        starts, widths, labels = starts[inside], widths[inside], labels[inside]
        return Candidates(starts, starts + widths, labels, scores[starts, widths, labels])
    counts, is_end, run_ends = _word_runs(scores, threshold)
    parts = []
    for word, label in zip(*np.nonzero(counts), strict=True):
        run = slice(word, run_ends[word, label])
        ends = np.flatnonzero(is_end[run, label])
        inside = np.minimum.accumulate(scores[run, 2, label])[ends]
        least = np.minimum(np.minimum(inside, scores[run, 1, label][ends]), scores[word, 0, label])
        parts.append((np.full(len(ends), word), word + ends, np.full(len(ends), label), least))
    if not parts:
        nothing = np.zeros(0, np.int64)
        return Candidates(nothing, nothing, nothing, np.zeros(0, np.float32))
    return Candidates._make(map(np.concatenate, zip(*parts, strict=True)))


def _sigmoid(logits: Floats) -> Floats:
    with np.errstate(over="ignore"):  # exp becomes infinite, and the score 0
        scores = 1 / (1 + np.exp(-logits))
    return scores.astype(np.float32, copy=False)


def _word_runs(
    scores: Floats, threshold: float
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Return how many candidates of a label start at a word [w, l], and where they may end.

    These are whether a word is an end, and the first word from a start on that is not inside.
    """
    is_start, is_end = scores[:, 0] > threshold, scores[:, 1] > threshold
    is_outside = scores[:, 2] < threshold
    numbers = np.where(is_outside, np.arange(len(scores))[:, None], len(scores))
    run_ends = np.minimum.accumulate(numbers[::-1], axis=0)[::-1]
    before = np.zeros((len(scores) + 1, scores.shape[2]), np.int64)
    np.cumsum(is_end, axis=0, out=before[1:])
    counts = np.where(is_start, np.take_along_axis(before, run_ends, 0) - before[:-1], 0)
    return counts, is_end, run_ends


def pooled(windows: Sequence[tuple[int, Candidates]]) -> Candidates:
    """Return the candidates of windows by the number of their first word; the best of equal ones.

    They are in the order of starts, ends and labels.
    """
    if len(windows) == 1:
        return windows[0][1]
    starts = np.concatenate([first + one.starts for first, one in windows])
    ends = np.concatenate([first + one.ends for first, one in windows])
    labels = np.concatenate([one.labels for _, one in windows])
    scores = np.concatenate([one.scores for _, one in windows])
    order = np.lexsort((-scores, labels, ends, starts))
    keys = np.stack([starts, ends, labels])[:, order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (keys[:, 1:] != keys[:, :-1]).any(0)
    kept = order[is_first]
    return Candidates(starts[kept], ends[kept], labels[kept], scores[kept])


def choose(candidates: Candidates, words: int, *, flat: bool, multi_label: bool) -> list[int]:
    """Return the numbers of the candidates that are entities, sorted by their starts.

    The best candidate is next, unless it clashes with an entity. Equal spans clash, unless a span
    may have several labels. Others clash if they share a word; unless entities are flat, only if
    neither contains the other.
    """
    order = np.argsort(-candidates.scores, kind="stable")
    chosen = _Chosen(words, flat=flat, multi_label=multi_label)
    kept = []
    for first in range(0, len(order), _BLOCK):
        block = order[first : first + _BLOCK]
        starts, ends = candidates.starts[block], candidates.ends[block]
        free = chosen.may_be_free(starts, ends)
        for number, start, end in zip(
            block[free].tolist(), starts[free].tolist(), ends[free].tolist(), strict=True
        ):
            if chosen.add(start, end):
                kept.append(number)
    return sorted(kept, key=lambda number: int(candidates.starts[number]))


def _largest(
    values: NDArray[np.int64], firsts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the largest of ``values[first:end]`` for each pair; less than -n of none of n values.

    A row has the largest of 1, 2, 4 or more values from each on, and two of a row are any number.
    """
    rows = [values]
    for power in range(len(values).bit_length() - 1):
        rows.append(np.maximum(rows[-1][: -(2**power)], rows[-1][2**power :]))
    largest = np.full(len(firsts), -len(values) - 1)
    powers = np.frexp(ends - firsts)[1] - 1  # -1 for none
    for power, row in enumerate(rows):
        at = np.flatnonzero(powers == power)
        largest[at] = np.maximum(row[firsts[at]], row[ends[at] - 2**power])
    return largest


class _Chosen:
    """The entities of a text so far."""

    def __init__(self, words: int, *, flat: bool, multi_label: bool) -> None:
        self._flat, self._multi_label = flat, multi_label
        self._spans: set[Bounds] = set()
        self._taken = bytearray(words)
        self._last_of_start = [-1] * words  # the end of the longest entity from a word on
        self._first_of_end = [words] * words

    def may_be_free(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return False for spans that clash; those with True may clash too."""
        if self._flat and self._multi_label:
            return np.ones(len(starts), bool)
        if self._flat:
            taken = np.frombuffer(self._taken, np.uint8)
            before = np.concatenate([[0], np.cumsum(taken, dtype=int)])
            free: NDArray[np.bool_] = before[ends + 1] == before[starts]
            return free
        last = _largest(np.array(self._last_of_start), starts + 1, ends + 1)
        first = -_largest(-np.array(self._first_of_end), starts, ends)
        return (last <= ends) & (first >= starts)

    def add(self, start: int, end: int) -> bool:
        """Add a span of words, unless it clashes; return whether it was added."""
        if (start, end) in self._spans:
            if not self._multi_label:
                return False
        elif self._flat:
            if any(self._taken[start : end + 1]):
                return False
            self._taken[start : end + 1] = b"\x01" * (end + 1 - start)
        elif max(self._last_of_start[start + 1 : end + 1], default=-1) > end or (
            min(self._first_of_end[start:end], default=start) < start
        ):
            return False
        self._spans.add((start, end))
        self._last_of_start[start] = max(self._last_of_start[start], end)
        self._first_of_end[end] = min(self._first_of_end[end], start)
        return True
