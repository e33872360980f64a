"""Question answering: the windows of a context, their limits, and who gets which answer."""

from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads import ArrayResult
from cloze.model_store.heads.span import SpanOptions
from cloze.service.tasks import TASKS
from cloze.service.tasks.qa import QaPair
from cloze.service.tasks.task import TextUsage
from tests.support.task_model import context, decoded, limited, manifest, prepared, tokens, types

# The model reads 12 tokens: [CLS], the question, [SEP], 7 tokens of a context, [SEP].
ASKED = "who is"
SEVEN = "a b c d e f g"


def pair(passage: str, question: str = ASKED) -> QaPair:
    return QaPair(question=question, context=passage)


def test_a_short_context_is_one_window() -> None:
    request = prepared("qa", pair(SEVEN), return_usage=True)
    assert tokens(request) == [f"[CLS] who is [SEP] {SEVEN} [SEP]"]
    assert types(request) == [[0] * 4 + [1] * 8]
    assert request.usage == [TextUsage(12, 12)]
    assert request.truncated == 0
    assert list(request.encodings[0].requests) == ["span"]


def test_an_answer_may_repeat_its_context() -> None:
    wide = limited(max_text_characters=10_000)
    short, long = (prepared("qa", pair(f"a{' ' * spaces}"), wide) for spaces in (10, 5000))
    assert long.answer_rows == short.answer_rows + 5


def test_a_long_context_is_divided() -> None:
    # The stride is half the sequence, 6 tokens.
    request = prepared("qa", [pair(f"{SEVEN} h i")], return_usage=True)
    assert tokens(request) == [
        "[CLS] who is [SEP] a b c d e f g [SEP]",
        "[CLS] who is [SEP] b c d e f g h [SEP]",
        "[CLS] who is [SEP] c d e f g h i [SEP]",
    ]
    assert request.usage == [TextUsage(14, 14, [(0, 13), (2, 15), (4, 17)])]
    request = prepared("qa", pair(f"{SEVEN} h i"), doc_stride=1)
    assert tokens(request)[1:] == ["[CLS] who is [SEP] g h i [SEP]"]
    request = prepared("qa", pair(SEVEN), max_seq_len=8, doc_stride=0)
    assert tokens(request) == [
        "[CLS] who is [SEP] a b c [SEP]",
        "[CLS] who is [SEP] d e f [SEP]",
        "[CLS] who is [SEP] g [SEP]",
    ]
    # A stride of half the sequence would leave nothing new: half the window instead.
    request = prepared("qa", pair(f"{SEVEN} h", "who is a b c"))
    assert tokens(request)[:2] == [
        "[CLS] who is a b c [SEP] a b c d [SEP]",
        "[CLS] who is a b c [SEP] c d e f [SEP]",
    ]


def test_windows_keep_room_for_a_second_separator() -> None:
    described = manifest().tokenizer.model_dump() | {"pair_separators": 2, "second_type": 0}
    request = prepared("qa", [pair(f"{SEVEN} h")], context(tokenizer=described), doc_stride=2)
    assert tokens(request) == [
        "[CLS] who is [SEP] [SEP] a b c d e f [SEP]",
        "[CLS] who is [SEP] [SEP] e f g h [SEP]",
    ]
    assert not any(map(sum, types(request)))


def test_each_question_gets_the_answer_of_its_windows() -> None:
    request = prepared("qa", [pair("a b"), pair("c d")], max_answer_len=1)
    logits = np.full((7, 2), -9, np.float32)
    first, second = logits.copy(), logits.copy()
    first[5] = second[4] = 5
    outputs = [{"span": ArrayResult(rows)} for rows in (first, second)]
    answers = decoded("qa", request, outputs)
    assert [a.answer for a in answers] == ["b", "c"]


@pytest.mark.parametrize(
    ("first", "threshold", "answer"), [(4, None, "b"), (4, -3.0, ""), (6, None, ""), (6, 3.0, "b")]
)
def test_the_threshold_of_the_manifest_decides(
    first: int, threshold: float | None, answer: str
) -> None:
    heads = dict(manifest().heads)
    if threshold is not None:
        heads["span"] = SpanOptions(no_answer_threshold=threshold)
    with_threshold = context(heads={name: one.model_dump() for name, one in heads.items()})
    request = prepared("qa", pair("a b"), with_threshold, handle_impossible_answer=True)
    logits = np.full((7, 2), -9, np.float32)
    logits[0], logits[5] = first, 5
    outputs = [{"span": ArrayResult(logits)}]
    assert decoded("qa", request, outputs, with_threshold)[0].answer == answer


def test_a_long_question_is_cut() -> None:
    request = prepared(
        "qa", pair("a", "who is the old king"), max_question_len=2, return_usage=True
    )
    assert tokens(request) == ["[CLS] who is [SEP] a [SEP]"]
    assert (request.truncated, request.usage) == (1, [TextUsage(9, 6)])


def test_a_long_context_is_cut_if_asked() -> None:
    request = prepared("qa", pair(f"{SEVEN} h"), long_text="truncate", return_usage=True)
    assert tokens(request) == [f"[CLS] who is [SEP] {SEVEN} [SEP]"]
    assert (request.truncated, request.usage) == (1, [TextUsage(13, 12)])


def test_defaults_are_those_of_the_pipeline_within_the_model() -> None:
    _, options = prepared("qa", pair("a")).state
    assert (options.max_answer_len, options.max_seq_len, options.max_question_len) == (12, 12, 12)
    wide = context(
        limited(max_tokens=500).limits, architecture=manifest().architecture.model_dump()
    )
    _, options = prepared("qa", pair("a"), wide).state
    assert (options.max_answer_len, options.max_seq_len, options.max_question_len) == (15, 384, 64)
    assert (options.top_k, options.doc_stride, options.align_to_words) == (1, None, True)
    assert (options.handle_impossible_answer, options.details) == (False, False)


def test_a_task_is_served_by_models_with_its_heads() -> None:
    assert TASKS["qa"].is_served_by(manifest())
    fewer: dict[str, Any] = {"tasks": [task for task in manifest().tasks if task != "qa"]}
    assert not TASKS["qa"].is_served_by(manifest(**fewer))
