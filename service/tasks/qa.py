"""Extractive question answering: the spans of a context that answer a question, as transformers v4's pipeline finds them.

A context that does not fit is read in overlapping windows. In each window start and end logits are softmaxed over the
context's tokens and ``[CLS]``; a span's score is the product; the best spans of all windows are merged (a text found
twice adds its scores) and given with character offsets, widened to whole words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.core import Float32, InvalidRequest, Output, Query
from service.tasks.prepared import Prepared, TaskLimits, check_range, check_text
from service.tokenizer import Spans, Tokenizer

_DEFAULT_SEQUENCE_TOKENS = 384
_DEFAULT_STRIDE = 128

_WINDOW_RESULTS = 32
"""Decoding a window costs about as much as so many predictions."""


@dataclass(frozen=True, slots=True)
class QaOptions:
    """transformers' parameters, by their names and with their defaults.

    Attributes:
        top_k: answers a question.
        doc_stride: tokens that neighbouring windows share; None: ``min(max_seq_len // 2, 128)``.
        max_answer_len: tokens an answer may have.
        max_seq_len: tokens of a window, question and special tokens included; None: 384, or less if the model reads less.
        max_question_len: a longer question is cut.
        handle_impossible_answer: whether "no answer" (an empty text) is a candidate.
        align_to_words: whether an answer's ends are moved to those of the words they lie in.
    """

    top_k: int = 1
    doc_stride: int | None = None
    max_answer_len: int = 15
    max_seq_len: int | None = None
    max_question_len: int = 64
    handle_impossible_answer: bool = False
    align_to_words: bool = True


@dataclass(frozen=True, slots=True)
class QaAnswer:
    """A span of the context: ``context[start:end] == answer``, in characters."""

    answer: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Question:
    """A question's windows.

    Attributes:
        question_tokens: how many the windows begin with, ``[CLS]`` and ``[SEP]`` not counted.
        windows: (first, end) token of the context in each window.
    """

    context: str
    spans: Spans
    question_tokens: int
    windows: list[tuple[int, int]]


def prepare(
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    names: Sequence[str],
    limits: TaskLimits,
    options: QaOptions,
) -> Prepared[list[list[QaAnswer]]]:
    """Tokenize (question, context) pairs into windows; the result has the best answers of each.

    Args:
        tokenizer: the model's.
        pairs: at least one.
        names: how errors name each pair.
        limits: see `TaskLimits`.
        options: see `QaOptions`.

    Raises:
        InvalidRequest: an empty text, or an option out of its limits.
    """
    sequence_tokens = _check_options(options, limits)
    if len(pairs) * options.top_k > limits.max_results:
        raise InvalidRequest(f"the request asks for {len(pairs) * options.top_k} answers; the limit is {limits.max_results}")
    questions: list[_Question] = []
    queries: list[Query] = []
    truncated = tokens = 0
    for (question, context), name in zip(pairs, names, strict=True):
        check_text(question, f"{name}.question", limits)
        check_text(context, f"{name}.context", limits)
        question_ids = tokenizer.ids([question])[0]
        spans = tokenizer.spans(context)
        if not question_ids or not spans.ids:
            raise InvalidRequest(
                f"{name}.{'context' if question_ids else 'question'} has no token, only spaces or control characters"
            )
        cut = question_ids[: options.max_question_len]
        truncated += len(cut) < len(question_ids)
        room = sequence_tokens - len(cut) - 3
        stride = _stride(options, sequence_tokens, room, name)
        tokens += (1 + max(0, -(-(len(spans.ids) - room) // (room - stride)))) * sequence_tokens
        if tokens > limits.max_request_tokens:
            raise InvalidRequest(
                f"up to {name} the windows hold {tokens} tokens; the limit of a request is {limits.max_request_tokens}"
            )
        windows = _windows(len(spans.ids), room, stride)
        questions.append(_Question(context, spans, len(cut), windows))
        queries += [tokenizer.pair(cut, spans.ids[first:end], sequence_tokens)[0] for first, end in windows]

    def decode(outputs: Sequence[Output]) -> list[list[QaAnswer]]:
        rest = iter(outputs)
        return [_best_answers(question, [next(rest) for _ in question.windows], options) for question in questions]

    return Prepared(queries, decode, len(queries) * _WINDOW_RESULTS, truncated)


def _check_options(options: QaOptions, limits: TaskLimits) -> int:
    """Returns the tokens of a window."""
    check_range(options.top_k, 1, limits.max_top_k, "top_k")
    check_range(options.max_answer_len, 1, limits.max_tokens, "max_answer_len")
    check_range(options.max_question_len, 1, limits.max_tokens, "max_question_len")
    sequence_tokens = options.max_seq_len
    if sequence_tokens is None:
        sequence_tokens = min(limits.max_tokens, _DEFAULT_SEQUENCE_TOKENS)
    check_range(sequence_tokens, 8, limits.max_tokens, "max_seq_len")
    return sequence_tokens


def _stride(options: QaOptions, sequence_tokens: int, room: int, name: str) -> int:
    """How many tokens neighbouring windows share."""
    if room < 1:
        raise InvalidRequest(
            f"{name}.question leaves no room for the context: max_seq_len {sequence_tokens}, "
            f"max_question_len {options.max_question_len}"
        )
    if options.doc_stride is None:
        stride = min(sequence_tokens // 2, _DEFAULT_STRIDE)
        return stride if stride < room else room // 2
    check_range(options.doc_stride, 0, room - 1, "doc_stride")
    return options.doc_stride


def _windows(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Cut ``tokens`` into windows of at most ``room`` of which neighbours share ``stride``."""
    windows = [(0, min(room, tokens))]
    while windows[-1][1] < tokens:
        first = windows[-1][0] + room - stride
        windows.append((first, min(first + room, tokens)))
    return windows


def _best_answers(question: _Question, outputs: Sequence[Output], options: QaOptions) -> list[QaAnswer]:
    # Aligning to words may merge candidates, hence a few more of them.
    candidates = options.top_k * 2 + 10 if options.align_to_words else options.top_k
    merged: dict[str, QaAnswer] = {}
    no_answer = 1e6
    for (first, end), output in zip(question.windows, outputs, strict=True):
        assert output.span_logits is not None
        begin = question.question_tokens + 2
        logits = np.concatenate([output.span_logits[:1], output.span_logits[begin : begin + end - first]])  # [CLS], context
        scores = np.exp(logits - logits.max(0))
        scores /= scores.sum(0)
        no_answer = min(no_answer, float(scores[0, 0] * scores[0, 1]))
        for score, start_token, end_token in _best_spans(scores[1:], candidates, options.max_answer_len):
            start, stop = _characters(
                question.spans, first + start_token, first + end_token, (first, end), options.align_to_words
            )
            text = question.context[start:stop]
            same = merged.get(text.lower())
            if same is None:
                merged[text.lower()] = QaAnswer(text, score, start, stop)
            else:
                merged[text.lower()] = QaAnswer(same.answer, same.score + score, same.start, same.end)
    answers = list(merged.values())
    if options.handle_impossible_answer:
        answers.append(QaAnswer("", no_answer, 0, 0))
    return sorted(answers, key=lambda answer: -answer.score)[: options.top_k]


def _best_spans(scores: Float32, count: int, max_answer_tokens: int) -> list[tuple[float, int, int]]:
    """The ``count`` best (score, start, end) of ``scores [C, 2]``, ends inclusive, at most ``max_answer_tokens`` long."""
    products = np.outer(scores[:, 0], scores[:, 1])  # [C, C]
    products = np.tril(np.triu(products), max_answer_tokens - 1)
    flat = products.ravel()
    count = min(count, flat.size)
    best = np.argpartition(-flat, count - 1)[:count]
    best = best[np.argsort(-flat[best], kind="stable")]
    starts, ends = np.unravel_index(best, products.shape)
    return [
        (float(flat[place]), int(start), int(end))
        for place, start, end in zip(best, starts, ends, strict=True)
        if flat[place] > 0 or place == best[0]
    ]


def _characters(spans: Spans, start: int, end: int, window: tuple[int, int], align_to_words: bool) -> tuple[int, int]:
    """The characters from the context's token ``start`` through ``end``."""
    if align_to_words:
        while start > window[0] and spans.words[start - 1] == spans.words[start]:
            start -= 1
        while end + 1 < window[1] and spans.words[end + 1] == spans.words[end]:
            end += 1
    return spans.offsets[start][0], spans.offsets[end][1]
