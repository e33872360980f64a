"""Question answering: the windows of a context, their limits, and who gets which answer."""

from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads import ArrayResult
from cloze.model_store.heads.span import SpanOptions
from cloze.service.tasks import TASKS
from cloze.service.tasks.qa import QaPair
from tests.support.task_model import context, decoded, limited, manifest, prepared


def pair(passage: str) -> QaPair:
    return QaPair(question="who is", context=passage)


def test_an_answer_may_repeat_its_context() -> None:
    wide = limited(max_text_characters=10_000)
    short, long = (prepared("qa", pair(f"a{' ' * spaces}"), wide) for spaces in (10, 5000))
    assert long.answer_rows == short.answer_rows + 5


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
