"""Finds the spans of a context that answer a question, from the logits of its windows.

In each window, the start logits and the end logits pass through a softmax over ``[CLS]`` and the
tokens of the context. The score of a span is the product of its start and end scores, as in the
pipeline of transformers v4. The ends of an answer are moved to the ends of words. A span of white
space alone is no answer.

A model may have a threshold of "no answer". Each logit of ``[CLS]`` is lower by half of it, so "no
answer" wins in a window if the sum of its logits exceeds that of the best span by more than the
threshold, as in SQuAD 2.0's script. With a threshold of 0, scores are those of the pipeline.

The scores of a window's spans with the same text are added: the sum is the probability that the
window gives to the text, at most 1. Each window has a distribution of its own, so a text has the
score of its best window. The pipeline adds the scores of all windows, up to their number.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from cloze.service.core import Float32
from cloze.service.errors import TooMany
from cloze.service.tasks.task import softmax
from cloze.service.tasks.texts import Bounds, LongText
from cloze.service.text.tokenizer import Spans
from cloze.service.threads import check_awaited

_SPAN_BYTES: Final = 256
"""Memory of a span besides its text."""

_MOST_BYTES: Final = 24_000_000
"""Most memory of spans at once. Spans overlap, so they may need many times their context's."""

_MOST_PRODUCTS: Final = 1 << 18
"""Most spans whose scores are computed at once; a model may read 8,192 tokens."""


class SpanMemory:
    """Bounds the spans of one request: those of one context, and the answers of those before."""

    def __init__(self) -> None:
        self._kept = self._held = 0

    def add(self, characters: int) -> None:
        """Count a span, whose text is kept twice: as it is, and in lower case."""
        self._held += _SPAN_BYTES + 2 * characters
        if self._held > _MOST_BYTES:
            raise TooMany(
                f"the spans of the windows need more than {_MOST_BYTES} bytes, the limit; "
                "send fewer contexts, or lower top_k, max_answer_len or doc_stride"
            )

    def keep(self, answers: Sequence["QaAnswer"]) -> None:
        """Count the answers to a question, whose other spans are dropped."""
        self._kept += sum(_SPAN_BYTES + len(answer.answer) for answer in answers)
        self._held = self._kept


@dataclass(frozen=True, slots=True)
class QaAnswer:
    """A span of the context: ``context[start:end]`` is the answer, in characters."""

    answer: str
    score: float
    start: int
    end: int


AnswerSpans = QaAnswer | list[QaAnswer]
"""The result for one question: the best answer, or a list of answers with `top_k` above 1."""


@dataclass(frozen=True, slots=True)
class QaWindow:
    """One window of a context, ``context[start:end]``, and its best span.

    Attributes:
        best: the span, with the score that it has in this window.
        no_answer: the score of "no answer" in this window.
        rank: rank of the span's text among all answers, from 1.
        reason: whether the span is among the answers, or why it is not.
    """

    start: int
    end: int
    best: QaAnswer
    no_answer: float
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class QaDetails:
    """The answers to a question, and the best span of each window of its context."""

    answers: list[QaAnswer]
    windows: list[QaWindow]


@dataclass(frozen=True, slots=True)
class Question:
    """The context of a question with its tokens and windows."""

    context: str
    spans: Spans
    context_start: int  # index of the context's first token in the encoding of each window
    windows: list[Bounds]  # (first, end) tokens of the context in each window
    first_ends: NDArray[np.intp]  # see `first_ends`


@dataclass(frozen=True, slots=True)
class QaOptions:
    """The parameters of the task, with defaults for absent values.

    Attributes:
        no_answer_threshold: the model's, see `span.SpanOptions`.
    """

    max_seq_len: int
    max_answer_len: int
    max_question_len: int
    top_k: int = 1
    doc_stride: int | None = None
    handle_impossible_answer: bool = False
    align_to_words: bool = True
    details: bool = False
    long_text: LongText = "window"
    return_usage: bool = False
    no_answer_threshold: float = 0.0


def first_ends(context: str, spans: Spans) -> NDArray[np.intp]:
    """Return the first token, of each token of a context on, that is not white space alone.

    A span that ends before the first end of its start is white space. The number of tokens stands
    for "none".
    """
    # Most tokens hold text, whose first character then is none of white space.
    is_blank = [
        start == end or (context[start].isspace() and context[start:end].isspace())
        for start, end in zip(spans.starts, spans.ends, strict=True)
    ]
    tokens = np.arange(len(is_blank))
    ends: NDArray[np.intp] = np.where(is_blank, len(is_blank), tokens)
    return np.minimum.accumulate(ends[::-1])[::-1]


def best_answers(
    question: Question, logits: Sequence[Float32], options: QaOptions, memory: SpanMemory
) -> AnswerSpans | QaDetails:
    """Return the best answers to a question, by the logits [tokens, 2] of each window."""
    windows = [
        _search(question, bounds, window_logits, options, memory)
        for bounds, window_logits in zip(question.windows, logits, strict=True)
    ]
    ranked = _ranked(windows, options)
    answers = ranked[: options.top_k]
    memory.keep(answers)
    if options.details:
        return _details(question, windows, ranked, answers)
    return answers[0] if options.top_k == 1 else answers


class _Window(NamedTuple):
    """The spans of one window, best first, and the score of "no answer"."""

    spans: list[QaAnswer]
    no_answer: float


def _search(
    question: Question, bounds: Bounds, logits: Float32, options: QaOptions, memory: SpanMemory
) -> _Window:
    check_awaited()
    # The start and end scores [2, 1 + C] of [CLS] and the C tokens of the context.
    first = question.context_start
    selected = np.concatenate([logits[:1], logits[first : first + bounds[1] - bounds[0]]])
    selected[0] -= options.no_answer_threshold / 2
    scores = softmax(np.ascontiguousarray(selected.T))
    ends = question.first_ends[slice(*bounds)] - bounds[0]
    best = []
    if ends[0] < len(ends):  # else the window is white space
        # Several spans may become the same whole words.
        count = options.top_k * 2 + 10 if options.align_to_words else options.top_k
        best = _best_spans(scores[:, 1:], ends, count, options.max_answer_len)
    spans = []
    for score, start, last in best:
        start, last, words = bounds[0] + start, bounds[0] + last, question.spans.words
        if options.align_to_words:
            while start > bounds[0] and words[start - 1] == words[start]:
                start -= 1
            while last + 1 < bounds[1] and words[last + 1] == words[last]:
                last += 1
        start, end = question.spans.starts[start], question.spans.ends[last]
        memory.add(end - start)
        spans.append(QaAnswer(question.context[start:end], score, start, end))
    return _Window(spans, float(scores[0, 0] * scores[1, 0]))


def _ranked(windows: Sequence[_Window], options: QaOptions) -> list[QaAnswer]:
    """Return the answers of all windows, best first; the case of their texts does not count."""
    best: dict[str, QaAnswer] = {}  # by lower-case text
    for window in windows:
        merged: dict[str, QaAnswer] = {}
        for answer in window.spans:
            key = answer.answer.lower()
            if (same := merged.get(key)) is not None:
                # Float32 rounds a sum of probabilities to slightly more than 1.
                answer = replace(same, score=min(same.score + answer.score, 1.0))
            merged[key] = answer
        for key, answer in merged.items():
            if (other := best.get(key)) is None or answer.score > other.score:
                best[key] = answer
    answers = list(best.values())
    if options.handle_impossible_answer:
        answers.append(QaAnswer("", min(window.no_answer for window in windows), 0, 0))
    return sorted(answers, key=lambda answer: -answer.score)


def _details(
    question: Question,
    windows: Sequence[_Window],
    ranked: Sequence[QaAnswer],
    answers: list[QaAnswer],
) -> QaDetails:
    """Return the answers with the best span of each window that is not white space alone."""
    ranks = {answer.answer.lower(): rank for rank, answer in enumerate(ranked, start=1)}
    characters = question.spans.characters(question.windows)
    details = []
    for (start, end), window in zip(characters, windows, strict=True):
        if not window.spans:
            continue
        best = window.spans[0]
        rank = ranks[best.answer.lower()]
        reason = "returned"
        if rank > len(answers):
            others = "1 answer has" if rank == 2 else f"{rank - 1} answers have"
            doubt = "; the window rather has no answer" if window.no_answer > best.score else ""
            reason = f"{others} a higher score{doubt}"
        details.append(QaWindow(start, end, best, window.no_answer, rank, reason))
    return QaDetails(answers, details)


def _best_spans(
    scores: Float32, first_ends: NDArray[np.intp], count: int, max_answer_tokens: int
) -> list[tuple[float, int, int]]:
    """Return the best spans as (score, first token, last token), best first.

    The scores [2, C] are the start and end scores of the context's tokens; no span ends before the
    first end [C] of its start. Of equal scores, the span that starts first is better, then the
    shorter span.
    """
    starts, tokens = scores[0], len(first_ends)
    width = min(max_answer_tokens, tokens)
    # The score of an end after the last token is 0.
    ends = np.concatenate([scores[1], np.zeros(width - 1, np.float32)])
    band = sliding_window_view(ends, width)  # [C, width]: the ends of the spans of each start
    best, indices = np.empty(0, np.float32), np.empty(0, np.int64)
    shortest = first_ends - np.arange(tokens)  # 0 without white space
    rows = max(1, _MOST_PRODUCTS // width)
    for first in range(0, tokens, rows):
        check_awaited()
        part = starts[first : first + rows]
        if len(best) == count and part.max() * ends[first:].max() <= best[-1]:
            continue  # no span of these starts is among the best
        products = part[:, None] * band[first : first + rows]
        products[np.arange(width) < shortest[first : first + rows, None]] = -1
        products = products.ravel()
        chosen = _largest(products, count)
        best = np.concatenate([best, products[chosen]])
        indices = np.concatenate([indices, chosen + first * width])
        chosen = _largest(best, count)
        best, indices = best[chosen], indices[chosen]
    firsts, lengths = np.divmod(indices, width)
    spans = zip(best.tolist(), firsts.tolist(), (firsts + lengths).tolist(), strict=True)
    return [span for index, span in enumerate(spans) if span[0] > 0 or index == span[0] == 0]


def _largest(values: Float32, count: int) -> NDArray[np.intp]:
    """Return the indices of the largest values, the largest first; of equal values, the first."""
    indices = np.arange(len(values))
    if len(values) > count:
        indices = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return indices[np.argsort(-values[indices], kind="stable")[:count]]
