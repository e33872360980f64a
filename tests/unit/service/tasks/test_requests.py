"""What no table shows: no text, defaults of the model, sets of labels, means of products."""

from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads.multi_vector import LateInteraction
from cloze.model_store.heads.sequence_classification import SequenceLabels
from cloze.service.errors import InvalidRequest
from cloze.service.tasks import TASKS, late_interaction
from cloze.service.tasks.qa import QaPair
from cloze.service.tasks.similarity import SimilarityInputs
from tests.support.refusals import refused
from tests.support.task_model import classifier, context, limited, manifest, prepared


@pytest.mark.parametrize("task", TASKS)
def test_a_task_takes_an_empty_list_for_no_text(task: str) -> None:
    """Only the task says that a list is empty: validation accepts the list."""
    inputs: Any = []
    place = "inputs"
    if task == "similarity":
        inputs, place = SimilarityInputs(source_sentence="a", sentences=[]), "inputs.sentences"
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


NLI = {"labels": ("contradiction", "entailment"), "problem_type": "single_label_classification"}
TWO_SETS = {
    "name": "mood",
    "labels": ("bad", "good", "so"),
    "problem_type": "multi_label_classification",
    "further": [NLI | {"name": "inference"}],
}


def test_thousands_of_label_sets_cost_little() -> None:
    """An error names the first of them, and choosing one looks at each set once."""
    further = [NLI | {"name": f"set-{number}"} for number in range(3000)]
    sets = {"sequence_classification": NLI | {"name": "first", "further": further}}
    with_sets = context(heads=classifier() | sets)
    request = prepared("text-classification", "a", with_sets, label_set="set-2999")
    assert request.state.logits == slice(6000, 6002)
    with pytest.raises(InvalidRequest) as raised:
        prepared("text-classification", "a", with_sets, label_set="other")
    assert len(str(raised.value)) < 400


def test_label_sets_have_names_that_differ_and_are_calibrated_by_name() -> None:
    with pytest.raises(ValueError, match="names that differ"):
        SequenceLabels.model_validate(TWO_SETS | {"name": "inference"})
    sets = SequenceLabels.model_validate(TWO_SETS)
    for name, expected in (("mood", [2.0, None]), ("inference", [None, 2.0])):
        assert [one.temperature for one in sets.calibrated(name, 2.0).sets] == expected
