"""Extractive question answering: the spans of a context that answer a question.

The answers are those of the pipeline of transformers v4. A long context is divided into overlapping
windows; `answer_spans` finds the best spans of all windows. Answers have character offsets.
"""

from typing import Annotated, Any, Final

from pydantic import Field

from cloze.model_store.heads import HeadRequest, span
from cloze.service.errors import InvalidRequest
from cloze.service.tasks.answer_spans import (
    AnswerSpans,
    QaDetails,
    QaOptions,
    Question,
    SpanMemory,
    best_answers,
    first_ends,
)
from cloze.service.tasks.task import (
    Input,
    Outputs,
    PreparedRequest,
    Task,
    TaskContext,
    check_has_tokens,
)
from cloze.service.tasks.texts import LongText, LongTextRule, TextEncoder, UsageParameters
from cloze.service.tasks.wire import Count, CountOrZero, NotEmpty, Text, WireModel, check_range

_DEFAULT_TOKENS: Final = {"max_seq_len": 384, "max_answer_len": 15, "max_question_len": 64}

_CHARACTERS_OF_A_ROW: Final = 1_000
"""Characters of a context, which each answer may repeat, that are written as fast as one row."""

_REQUEST: Final = {span.HEAD.name: HeadRequest()}


class QaPair(WireModel):
    """A question and the text that contains the answer."""

    question: Text
    context: Text


class QaParameters(UsageParameters):
    """The parameters of the pipeline of transformers v4, with the same names and defaults.

    A number of tokens is the model's limit where that is less than the default.
    """

    top_k: Count | None = None
    """answers per question; the default is 1"""
    doc_stride: CountOrZero | None = None
    """tokens that neighbouring windows share; default: min(max_seq_len // 2, 128)"""
    max_answer_len: Count | None = None
    """most tokens per answer; the default is 15"""
    max_seq_len: Count | None = None
    """tokens per window, question and special tokens included; the default is 384"""
    max_question_len: Count | None = None
    """most tokens per question, which is cut; the default is 64"""
    handle_impossible_answer: bool | None = None
    """whether the empty text, "no answer", is a candidate"""
    align_to_words: bool | None = None
    """whether to extend answers to whole words; the default is true"""
    long_text: LongText | None = None
    """error refuses a question or a context that is too long, truncate reads one window, window
    divides the context; the default is window"""
    details: bool | None = None
    """whether to return the best span of each window too"""


_Result = AnswerSpans | QaDetails
_State = tuple[list[Question], QaOptions]


def prepare(inputs: Any, parameters: QaParameters, context: TaskContext) -> PreparedRequest[_State]:
    """Tokenize questions and their contexts into windows."""
    limits = context.limits
    pairs = limits.checked(inputs)
    default = {name: min(limits.max_tokens, tokens) for name, tokens in _DEFAULT_TOKENS.items()}
    given = parameters.model_dump(include=set(QaParameters.model_fields), exclude_none=True)
    options = QaOptions(
        **(default | given),
        no_answer_threshold=span.no_answer_threshold(context.manifest.heads),
    )
    check_range(options.top_k, 1, limits.max_top_k, "top_k")
    check_range(options.max_answer_len, 1, limits.max_tokens, "max_answer_len")
    check_range(options.max_question_len, 1, limits.max_tokens, "max_question_len")
    check_range(options.max_seq_len, 8, limits.max_tokens, "max_seq_len")
    limits.check_results(len(pairs) * options.top_k, "the request asks for", "answers")
    rule = LongTextRule(options.long_text, side="right", report=options.return_usage)
    encoder = TextEncoder(rule, context, options.max_seq_len)
    questions = [_add(pair, options, encoder, context) for pair in pairs]
    contexts = sum(1 + len(question.context) // _CHARACTERS_OF_A_ROW for question in questions)
    prepared = encoder.prepared((questions, options))
    return prepared._replace(others=options.top_k * contexts)


def _add(
    pair: Input[QaPair], options: QaOptions, encoder: TextEncoder, context: TaskContext
) -> Question:
    """Add the windows of a question's context to the encodings of a request; see `prepare`."""
    (at, asked), tokenizer, most = pair, context.tokenizer, options.max_question_len
    at_question, at_context = at.below("question"), at.below("context")
    context.limits.checked(asked.question, at_question)
    context.limits.checked(asked.context, at_context)
    ids, spans = tokenizer.ids([asked.question])[0], tokenizer.spans(asked.context)
    check_has_tokens(ids, at_question)
    check_has_tokens(spans.ids, at_context)
    around = len(ids[:most]) + tokenizer.special.pair_tokens
    room = encoder.room(at_question, around)
    stride = min(options.max_seq_len // 2, 128)
    stride = stride if stride < room else room // 2
    if options.doc_stride is not None:
        stride = options.doc_stride
        check_range(stride, 0, room - 1, "doc_stride")
    encoder.rule = encoder.rule._replace(stride=stride)
    whole = len(ids) + len(spans.ids) + tokenizer.special.pair_tokens
    encoder.rule.check(at_question, len(ids), most, "max_question_len is")
    bounds = encoder.divide(at, len(spans.ids), around)
    if len(bounds) == 1:
        encoder.count(at, around + bounds[0][1] - bounds[0][0])
    read = spans.part(0, bounds[-1][1])
    ends = first_ends(asked.context, read)
    if ends[0] == len(ends):
        raise InvalidRequest("has no answer: its tokens are white space", at_context)
    encodings = [
        tokenizer.pair(ids[:most], read.ids[first:end], options.max_seq_len, _REQUEST)
        for first, end in bounds
    ]
    encoder.keep(encodings, whole, around + len(read.ids), bounds, asked.context)
    start = tokenizer.special.second_start(len(ids[:most]))
    return Question(asked.context, read, start, bounds, ends)


def decode(state: _State, outputs: Outputs, _: TaskContext) -> list[_Result]:
    """Return the best answers to each question."""
    rest, memory = iter(outputs), SpanMemory()
    questions, options = state
    results: list[_Result] = []
    for question in questions:
        logits = [next(rest)[span.HEAD.name].array for _ in question.windows]
        results.append(best_answers(question, logits, options, memory))
    return results


TASK: Final = Task(
    name="qa",
    route="/qa",
    summary="The span of a context that answers a question",
    heads=(span.HEAD.name,),
    inputs=Annotated[
        QaPair | Annotated[list[QaPair], NotEmpty],
        Field(description="a question with its context, or a list of them"),
    ],
    parameters=QaParameters,
    result=_Result | list[_Result],
    alone=(QaPair,),
    own_fields=("question",),
    prepare=prepare,
    decode=decode,
    scores=lambda *_: "probability",
    examples={
        "The best answer": {
            "inputs": {"question": "Who wrote it?", "context": "It was written by Ada."}
        },
    },
)
