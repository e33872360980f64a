"""Question answering: the defaults of its parameters."""

from cloze.service.tasks.qa import QaPair
from tests.support.task_model import context, limited, manifest, prepared


def pair(passage: str) -> QaPair:
    return QaPair(question="who is", context=passage)


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
