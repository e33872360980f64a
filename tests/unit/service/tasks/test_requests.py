"""What all tasks have in common: no text is refused, and parameters have no value of their own."""

import pytest

from cloze.service.tasks import TASKS
from cloze.service.tasks.similarity import SimilarityInputs
from tests.support.refusals import refused
from tests.support.task_model import prepared


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
