"""Extractive question answering: the spans of a context that answer a question.

The answers are those of the pipeline of transformers v4. A long context is divided into overlapping
windows. In each window, the start logits and the end logits pass through a softmax over ``[CLS]``
and the tokens of the context. The score of a span is the product of its start and end scores. The
best spans of all windows are merged: the scores of spans with the same text are added. Answers have
character offsets, and their ends are moved to the ends of words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final, NamedTuple

import numpy as np
from pydantic import Field

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import span
from cloze.service.core import Float32, InvalidRequest
from cloze.service.tasks.task import (
    Count,
    CountOrZero,
    Example,
    FirstError,
    NotEmpty,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    TaskLimits,
    Text,
    WireModel,
    check_range,
    check_text,
    input_name,
    listed,
)
from cloze.service.tasks.windows import window_count, windows
from cloze.service.tokenizer import Spans

_DEFAULT_SEQUENCE_TOKENS = 384
_DEFAULT_STRIDE = 128

_WINDOW_RESULTS = 32
"""Number of predictions of a mask whose decoding costs about as much as that of a window."""


class QaPair(WireModel):
    """A question and the text that contains the answer."""

    question: Text
    context: Text


class QaParameters(WireModel):
    """The parameters of the pipeline of transformers v4, with the same names and defaults."""

    top_k: Count | None = Field(None, description="answers per question; the default is 1")
    doc_stride: CountOrZero | None = Field(
        None,
        description="number of tokens that neighbouring windows share; "
        "the default is min(max_seq_len // 2, 128)",
    )
    max_answer_len: Count | None = Field(
        None, description="most tokens per answer; the default is 15"
    )
    max_seq_len: Count | None = Field(
        None,
        description="tokens per window, question and special tokens included; "
        "the default is 384, or the model's limit if that is less",
    )
    max_question_len: Count | None = Field(
        None, description="most tokens per question; a longer question is cut; the default is 64"
    )
    handle_impossible_answer: bool | None = Field(
        None, description='whether the empty text, "no answer", is a candidate'
    )
    align_to_words: bool | None = Field(
        None, description="whether to extend answers to whole words; the default is true"
    )
    details: bool | None = Field(
        None, description="whether to return the best span of each window too"
    )


@dataclass(frozen=True, slots=True)
class _Options:
    """The values of `QaParameters`, with defaults for absent values."""

    top_k: int = 1
    doc_stride: int | None = None
    max_answer_len: int = 15
    max_seq_len: int = _DEFAULT_SEQUENCE_TOKENS
    max_question_len: int = 64
    handle_impossible_answer: bool = False
    align_to_words: bool = True
    details: bool = False


@dataclass(frozen=True, slots=True)
class QaAnswer:
    """A span of the context: ``context[start:end]`` is the answer, in characters."""

    answer: str
    score: float
    start: int
    end: int


Answers = QaAnswer | list[QaAnswer]
"""The result for one question: the best answer, or a list of answers if there are several."""


@dataclass(frozen=True, slots=True)
class QaWindow:
    """One window of a context, ``context[start:end]``, and its best span.

    Attributes:
        start, end: the characters of the window.
        best: its best span, with the score that the span has in this window.
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
    """The answers to a question, and what each window of its context had to offer."""

    answers: list[QaAnswer]
    windows: list[QaWindow]


_Result = Answers | QaDetails


@dataclass(frozen=True, slots=True)
class _Question:
    """The context of a question with its windows.

    Attributes:
        context: the text of the context.
        spans: the tokens of the context.
        question_tokens: number of tokens of the question in each window, without special tokens.
        windows: (first, end) tokens of the context in each window.
    """

    context: str
    spans: Spans
    question_tokens: int
    windows: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _State:
    questions: list[_Question]
    options: _Options
    many: bool


def prepare(call: TaskCall, context: TaskContext) -> PreparedRequest[_State]:
    """Tokenize questions and their contexts into windows.

    Raises:
        EmptyRequest: a text is empty.
        InvalidRequest: a text has no token, or a parameter is out of its limits.
    """
    pairs, many = listed(call.inputs, context.limits), isinstance(call.inputs, list)
    options, limits = _options(call.parameters, context.limits), context.limits
    if (answers := len(pairs) * options.top_k) > limits.max_results:
        raise InvalidRequest(
            f"the request asks for {answers} answers; the limit is {limits.max_results}"
        )
    questions: list[_Question] = []
    encodings: list[Encoding] = []
    truncated = tokens = 0
    for index, pair in enumerate(pairs):
        name = input_name(index, many=many)
        ids, spans = _tokenize(pair, name, context)
        cut = ids[: options.max_question_len]
        truncated += len(cut) < len(ids)
        window_tokens = options.max_seq_len - len(cut) - 3
        stride = _stride(options, window_tokens, name)
        count = window_count(len(spans.ids), window_tokens, stride)
        tokens += count * options.max_seq_len
        if tokens > (most := limits.max_request_tokens):
            raise InvalidRequest(
                f"up to {name} the windows hold {tokens} tokens; the limit of a request is {most}"
            )
        bounds = windows(len(spans.ids), window_tokens, stride)
        question = _Question(pair.context, spans, len(cut), bounds)
        questions.append(question)
        for first, end in question.windows:
            encoding, _ = context.tokenizer.pair(cut, spans.ids[first:end], options.max_seq_len)
            encoding.requests = _REQUEST
            encodings.append(encoding)
    state = _State(questions, options, many)
    return PreparedRequest(encodings, state, len(encodings) * _WINDOW_RESULTS, truncated)


_REQUEST: Final = {span.HEAD.name: span.SpanRequest()}


def _options(parameters: QaParameters, limits: TaskLimits) -> _Options:
    default = {"max_seq_len": min(limits.max_tokens, _DEFAULT_SEQUENCE_TOKENS)}
    options = _Options(**(default | parameters.model_dump(exclude_none=True)))
    check_range(options.top_k, 1, limits.max_top_k, "top_k")
    check_range(options.max_answer_len, 1, limits.max_tokens, "max_answer_len")
    check_range(options.max_question_len, 1, limits.max_tokens, "max_question_len")
    check_range(options.max_seq_len, 8, limits.max_tokens, "max_seq_len")
    return options


def _tokenize(pair: QaPair, name: str, context: TaskContext) -> tuple[list[int], Spans]:
    """Return the question's ids and the context's tokens."""
    check_text(pair.question, f"{name}.question", context.limits)
    check_text(pair.context, f"{name}.context", context.limits)
    ids = context.tokenizer.ids([pair.question])[0]
    spans = context.tokenizer.spans(pair.context)
    if not ids or not spans.ids:
        empty = "context" if ids else "question"
        raise InvalidRequest(f"{name}.{empty} has no token, only spaces or control characters")
    return ids, spans


def _stride(options: _Options, window_tokens: int, name: str) -> int:
    """Return the number of context tokens that neighbouring windows share."""
    if window_tokens < 1:
        raise InvalidRequest(
            f"{name}.question leaves no room for the context: max_seq_len {options.max_seq_len}, "
            f"max_question_len {options.max_question_len}"
        )
    if options.doc_stride is None:
        stride = min(options.max_seq_len // 2, _DEFAULT_STRIDE)
        return stride if stride < window_tokens else window_tokens // 2
    check_range(options.doc_stride, 0, window_tokens - 1, "doc_stride")
    return options.doc_stride


def decode(
    prepared: PreparedRequest[_State], outputs: Sequence[HeadOutputs], _: TaskContext
) -> _Result | list[_Result]:
    """Return the best answers to one question, or a list of answers if the inputs are a list."""
    rest = iter(outputs)
    state = prepared.state
    results: list[_Result] = []
    for question in state.questions:
        logits = [next(rest)[span.HEAD.name].logits for _ in question.windows]
        windows = _search(question, logits, state.options)
        ranked = _ranked(windows, state.options)
        answers = ranked[: state.options.top_k]
        if state.options.details:
            results.append(_details(question, windows, ranked, answers))
        else:
            results.append(answers[0] if len(answers) == 1 else answers)
    return results if state.many else results[0]


class _Window(NamedTuple):
    """The spans of one window, best first, and the score of "no answer"."""

    spans: list[QaAnswer]
    no_answer: float


def _search(question: _Question, logits: Sequence[Float32], options: _Options) -> list[_Window]:
    """Return the best spans of each window.

    Args:
        question: the question's context and windows.
        logits: the logits [tokens, 2] of each window.
        options: the parameters of the request.
    """
    # Several spans may have the same text after they are extended to whole words.
    count = options.top_k * 2 + 10 if options.align_to_words else options.top_k
    offsets = question.spans.offsets
    windows = []
    for window, window_logits in zip(question.windows, logits, strict=True):
        scores = _scores(window_logits, question.question_tokens, window[1] - window[0])
        spans = []
        for score, first, last in _best_spans(scores[1:], count, options.max_answer_len):
            tokens = window[0] + first, window[0] + last
            if options.align_to_words:
                tokens = _whole_words(question.spans, tokens, window)
            start, end = offsets[tokens[0]][0], offsets[tokens[1]][1]
            spans.append(QaAnswer(question.context[start:end], score, start, end))
        windows.append(_Window(spans, float(scores[0, 0] * scores[0, 1])))
    return windows


def _ranked(windows: Sequence[_Window], options: _Options) -> list[QaAnswer]:
    """Return the answers of all windows, best first; spans of one text are one answer."""
    merged: dict[str, QaAnswer] = {}  # by lower-case text
    for window in windows:
        for answer in window.spans:
            key = answer.answer.lower()
            if (same := merged.get(key)) is not None:
                answer = replace(same, score=same.score + answer.score)
            merged[key] = answer
    answers = list(merged.values())
    if options.handle_impossible_answer:
        answers.append(QaAnswer("", min(window.no_answer for window in windows), 0, 0))
    return sorted(answers, key=lambda answer: -answer.score)


def _details(
    question: _Question,
    windows: Sequence[_Window],
    ranked: Sequence[QaAnswer],
    answers: list[QaAnswer],
) -> QaDetails:
    """Return the answers with the best span of each window."""
    ranks = {answer.answer.lower(): rank for rank, answer in enumerate(ranked, start=1)}
    details = []
    for (first, end), window in zip(question.windows, windows, strict=True):
        best = window.spans[0]
        rank = ranks[best.answer.lower()]
        details.append(
            QaWindow(
                start=question.spans.offsets[first][0],
                end=question.spans.offsets[end - 1][1],
                best=best,
                no_answer=window.no_answer,
                rank=rank,
                reason=_reason(rank, len(answers), window.no_answer > best.score),
            )
        )
    return QaDetails(answers, details)


def _reason(rank: int, returned: int, no_answer_is_likelier: bool) -> str:
    if rank <= returned:
        return "returned"
    others = "1 answer has" if rank == 2 else f"{rank - 1} answers have"
    doubt = "; the window rather has no answer" if no_answer_is_likelier else ""
    return f"{others} a higher score{doubt}"


def _scores(logits: Float32, question_tokens: int, context_tokens: int) -> Float32:
    """Return the start and end scores [1 + C, 2] of ``[CLS]`` and the C context tokens."""
    begin = question_tokens + 2  # after [CLS], the question and [SEP]
    context_logits = logits[begin : begin + context_tokens]
    selected = np.concatenate([logits[:1], context_logits])
    scores: Float32 = np.exp(selected - selected.max(0))
    scores /= scores.sum(0)
    return scores


def _best_spans(
    scores: Float32, count: int, max_answer_tokens: int
) -> list[tuple[float, int, int]]:
    """Return the best spans as (score, first token, last token), best first.

    Args:
        scores: [C, 2], the start and end scores of the context's tokens.
        count: most spans to return.
        max_answer_tokens: most tokens per span.
    """
    products = np.outer(scores[:, 0], scores[:, 1])  # [C, C]
    products = np.tril(np.triu(products), max_answer_tokens - 1)
    flat = products.ravel()
    count = min(count, flat.size)
    best = np.argpartition(-flat, count - 1)[:count]
    best = best[np.argsort(-flat[best], kind="stable")]
    starts, ends = np.unravel_index(best, products.shape)
    return [
        (float(flat[index]), int(start), int(end))
        for index, start, end in zip(best, starts, ends, strict=True)
        if flat[index] > 0 or index == best[0]
    ]


def _whole_words(spans: Spans, tokens: tuple[int, int], window: tuple[int, int]) -> tuple[int, int]:
    """Return the (first, last) tokens extended to whole words within a window."""
    start, end = tokens
    while start > window[0] and spans.words[start - 1] == spans.words[start]:
        start -= 1
    while end + 1 < window[1] and spans.words[end + 1] == spans.words[end]:
        end += 1
    return start, end


TASK: Final = Task(
    name="qa",
    route="/qa",
    summary="The span of a context that answers a question",
    heads=(span.HEAD.name,),
    inputs=Annotated[
        QaPair | Annotated[list[QaPair], FirstError(), NotEmpty],
        Field(
            description="a question with its context, or a list of them",
            examples=[{"question": "Who wrote it?", "context": "It was written by Ada."}],
        ),
    ],
    parameters=QaParameters,
    result=_Result | list[_Result],
    own_fields=("question",),
    prepare=prepare,
    decode=decode,
    examples=(
        Example(
            "The best answer",
            {"inputs": {"question": "Who wrote it?", "context": "It was written by Ada."}},
        ),
        Example(
            "The three best answers",
            {
                "inputs": {"question": "Who wrote it?", "context": "It was written by Ada."},
                "parameters": {"top_k": 3},
            },
        ),
    ),
)
