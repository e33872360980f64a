"""What every task declares: names on the wire, limits, and examples that the task accepts."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from cloze.service.tasks import TASKS, rerank, token_ids
from cloze.service.tasks.nsp import Candidates, Pair
from cloze.service.tasks.similarity import SimilarityInputs
from cloze.service.tasks.task import Task, TaskLimits
from tests.support.task_model import context

LABELLED = {"labels": ["a", "b", "c"], "problem_type": "single_label_classification"}
INFERENCE = {"name": "inference", **LABELLED}
WIDE = context(
    TaskLimits(
        max_tokens=128,
        max_masks=8,
        max_top_k=100,
        max_results=10_000,
        max_request_tokens=100_000,
        max_text_characters=10_000,
    ),
    limits={"max_tokens": 128},
    architecture=context().manifest.architecture.model_dump() | {"max_positions": 128},
    embedding=context().manifest.embedding.model_dump() | {"max_tokens": 128},  # type: ignore[union-attr]
    heads=context().manifest.model_dump(mode="json")["heads"]
    | {"sequence_classification": {"name": "sentiment", "further": [INFERENCE], **LABELLED}},
)


@pytest.mark.parametrize(
    ("task", "inputs", "texts"),
    [
        (TASKS["embed"], [5, 6, 7], 1),  # the ids of one text
        (TASKS["embed"], ["a", [5, 6]], 2),
        (TASKS["nsp"], Candidates(text="a", candidates=["a", "the"]), 3),
        (TASKS["nsp"], [Pair(text="a", next="the")], 1),
        (TASKS["similarity"], SimilarityInputs(source_sentence="a", sentences=["a", "the"]), 3),
        (token_ids.TOKENIZE, ["a", "the", "a"], 3),
        (token_ids.DECODE, [5, 6], 1),
        (rerank.TASK, rerank.RerankInputs(query="a", texts=["a", "the", "a"]), 3),
    ],
)
def test_a_prepared_request_says_how_many_texts_it_has(task: Task, inputs: Any, texts: int) -> None:
    """The access log and the traces show the number."""
    assert task.prepare(inputs, task.parameters(), WIDE).texts == texts


EXAMPLES = [
    pytest.param(name, dict(body), id=f"{name}-{title}")
    for name, task in TASKS.items()
    for title, body in task.examples.items()
]


@pytest.mark.parametrize(("name", "body"), EXAMPLES)
def test_a_task_accepts_its_examples(name: str, body: dict[str, Any]) -> None:
    task = TASKS[name]
    inputs = TypeAdapter(task.inputs).validate_python(body.pop("inputs"))
    values = body.pop("parameters", {}) | body
    parameters = task.parameters.model_validate(values)
    assert task.prepare(inputs, parameters, WIDE).encodings
    task.needs_thread(parameters)
