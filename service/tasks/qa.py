"""Extractive question answering: the spans of a context that answer a question.

The spans are those that transformers v4's pipeline finds. A context that does not fit is read in
overlapping windows. In each window start and end logits are softmaxed over the context's tokens
and ``[CLS]``; a span's score is the product. The best spans of all windows are merged: a text that
is found twice adds its scores. Answers carry character offsets and are widened to whole words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
from pydantic import Field

from model_store.batch import Encoding, HeadOutputs
from model_store.heads import span
from service.core import Float32, InvalidRequest
from service.tasks.task import (
    Example,
    FirstError,
    PreparedRequest,
    Task,
    TaskCall,
    TaskContext,
    TaskLimits,
    WireModel,
    check_range,
    check_text,
    input_name,
    listed,
)
from service.tasks.windows import window_count, windows
from service.tokenizer import Spans

_DEFAULT_SEQUENCE_TOKENS = 384
_DEFAULT_STRIDE = 128

_WINDOW_RESULTS = 32
"""Decoding a window costs about as much as this many predictions."""


class QaPair(WireModel):
    """A question and the text that holds its answer."""

    question: str
    context: str


class QaParameters(WireModel):
    """The parameters of transformers v4, by their names and with their defaults."""

    top_k: int | None = Field(None, description="answers per question; the default is 1")
    doc_stride: int | None = Field(
        None,
        description="tokens that neighbouring windows share; "
        "the default is min(max_seq_len // 2, 128)",
    )
    max_answer_len: int | None = Field(
        None, description="most tokens per answer; the default is 15"
    )
    max_seq_len: int | None = Field(
        None,
        description="tokens per window, question and special tokens included; "
        "the default is 384, or what the model reads",
    )
    max_question_len: int | None = Field(
        None, description="a longer question is cut; the default is 64 tokens"
    )
    handle_impossible_answer: bool | None = Field(
        None, description='whether "no answer" (an empty text) is a candidate'
    )
    align_to_words: bool | None = Field(
        None, description="move an answer's ends to those of words; the default is true"
    )


@dataclass(frozen=True, slots=True)
class _Options:
    """`QaParameters` with the defaults filled in; see there."""

    top_k: int = 1
    doc_stride: int | None = None
    max_answer_len: int = 15
    max_seq_len: int = _DEFAULT_SEQUENCE_TOKENS
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


Answers = QaAnswer | list[QaAnswer]
"""Of one question: the best answer, or a list of answers where ``top_k`` is above 1."""


@dataclass(frozen=True, slots=True)
class _Question:
    """A question's windows.

    Attributes:
        question_tokens: tokens of the question in each window, special tokens not counted.
        windows: (first, end) token of the context in each window.
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
        InvalidRequest: a text is empty, or a parameter is out of its limits.
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
        room = options.max_seq_len - len(cut) - 3
        stride = _stride(options, room, name)
        tokens += window_count(len(spans.ids), room, stride) * options.max_seq_len
        if tokens > (most := limits.max_request_tokens):
            raise InvalidRequest(
                f"up to {name} the windows hold {tokens} tokens; the limit of a request is {most}"
            )
        question = _Question(pair.context, spans, len(cut), windows(len(spans.ids), room, stride))
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


def _stride(options: _Options, room: int, name: str) -> int:
    """Return how many tokens neighbouring windows share."""
    if room < 1:
        raise InvalidRequest(
            f"{name}.question leaves no room for the context: max_seq_len {options.max_seq_len}, "
            f"max_question_len {options.max_question_len}"
        )
    if options.doc_stride is None:
        stride = min(options.max_seq_len // 2, _DEFAULT_STRIDE)
        return stride if stride < room else room // 2
    check_range(options.doc_stride, 0, room - 1, "doc_stride")
    return options.doc_stride


def decode(
    prepared: PreparedRequest[_State], outputs: Sequence[HeadOutputs], _: TaskContext
) -> Answers | list[Answers]:
    """Return the best answers to each question: to one question, if the request was one."""
    rest = iter(outputs)
    state = prepared.state
    results: list[Answers] = []
    for question in state.questions:
        logits = [next(rest)[span.HEAD.name].logits for _ in question.windows]
        answers = _best_answers(question, logits, state.options)
        results.append(answers[0] if len(answers) == 1 else answers)
    return results if state.many else results[0]


def _best_answers(
    question: _Question, logits: Sequence[Float32], options: _Options
) -> list[QaAnswer]:
    # Aligning to words may merge candidates, hence a few more of them.
    candidates = options.top_k * 2 + 10 if options.align_to_words else options.top_k
    merged: dict[str, QaAnswer] = {}
    no_answer = 1e6
    for (first, end), window_logits in zip(question.windows, logits, strict=True):
        begin = question.question_tokens + 2
        context_logits = window_logits[begin : begin + end - first]
        candidates_logits = np.concatenate([window_logits[:1], context_logits])  # [CLS], context
        scores = np.exp(candidates_logits - candidates_logits.max(0))
        scores /= scores.sum(0)
        no_answer = min(no_answer, float(scores[0, 0] * scores[0, 1]))
        for score, start_token, end_token in _best_spans(
            scores[1:], candidates, options.max_answer_len
        ):
            start, stop = _characters(
                question.spans,
                first + start_token,
                first + end_token,
                (first, end),
                options.align_to_words,
            )
            text = question.context[start:stop]
            same = merged.get(text.lower())
            if same is None:
                merged[text.lower()] = QaAnswer(text, score, start, stop)
            else:
                merged[text.lower()] = QaAnswer(
                    same.answer, same.score + score, same.start, same.end
                )
    answers = list(merged.values())
    if options.handle_impossible_answer:
        answers.append(QaAnswer("", no_answer, 0, 0))
    return sorted(answers, key=lambda answer: -answer.score)[: options.top_k]


def _best_spans(
    scores: Float32, count: int, max_answer_tokens: int
) -> list[tuple[float, int, int]]:
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


def _characters(
    spans: Spans, start: int, end: int, window: tuple[int, int], align_to_words: bool
) -> tuple[int, int]:
    """The characters from the context's token ``start`` through ``end``."""
    if align_to_words:
        while start > window[0] and spans.words[start - 1] == spans.words[start]:
            start -= 1
        while end + 1 < window[1] and spans.words[end + 1] == spans.words[end]:
            end += 1
    return spans.offsets[start][0], spans.offsets[end][1]


TASK: Final = Task(
    name="qa",
    route="/qa",
    summary="The span of a context that answers a question",
    heads=(span.HEAD.name,),
    inputs=Annotated[
        QaPair | Annotated[list[QaPair], FirstError()],
        Field(
            description="a question with its context, or a list of them",
            examples=[{"question": "Who wrote it?", "context": "It was written by Ada."}],
        ),
    ],
    parameters=QaParameters,
    result=Answers | list[Answers],
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
