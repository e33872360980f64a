"""No text is refused, and parameters that are left out have no value but that of the model."""

from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads.multi_vector import LateInteraction
from cloze.service.tasks import TASKS, late_interaction
from cloze.service.tasks.qa import QaPair
from cloze.service.tasks.similarity import SimilarityInputs
from tests.support.refusals import refused
from tests.support.task_model import context, limited, manifest, prepared


def compared(source: str, *sentences: str) -> SimilarityInputs:
    return SimilarityInputs(source_sentence=source, sentences=list(sentences))


@pytest.mark.parametrize("task", TASKS)
def test_a_task_takes_an_empty_list_for_no_text(task: str) -> None:
    """Only the task says that a list is empty: validation accepts the list."""
    inputs = compared("a") if task == "similarity" else []
    place = "inputs.sentences" if task == "similarity" else "inputs"
    with refused("empty_input", at=place):
        prepared(task, inputs)


def test_parameters_that_are_left_out_have_no_value() -> None:
    for name, task in TASKS.items():
        assert set(task.parameters().model_dump().values()) <= {None}, name


def test_defaults_of_answers_are_those_of_the_pipeline_within_the_model() -> None:
    def options(*model: Any) -> Any:
        return prepared("qa", QaPair(question="who is", context="a"), *model).state[1]

    own = options()
    assert (own.max_answer_len, own.max_seq_len, own.max_question_len) == (12, 12, 12)
    limits = limited(max_tokens=500).limits
    wide = options(context(limits, architecture=manifest().architecture.model_dump()))
    assert (wide.max_answer_len, wide.max_seq_len, wide.max_question_len) == (15, 384, 64)
    assert (wide.top_k, wide.doc_stride, wide.align_to_words) == (1, None, True)
    assert (wide.handle_impossible_answer, wide.details) == (False, False)


def test_scores_of_late_interaction_are_averaged_if_the_model_says_so() -> None:
    query = np.array([[1, 0], [0, 1]], np.float32)
    documents = [query, -query, query[:0]]
    options = LateInteraction(dimensions=2, query_tokens=8, document_tokens=8)
    assert late_interaction.scores(query, documents, options) == [2, 0, 0]
    averaged = options.model_copy(update={"averages": True})
    assert late_interaction.scores(query, documents, averaged) == [1, 0, 0]
