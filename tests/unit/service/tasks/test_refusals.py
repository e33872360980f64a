"""What tasks refuse, and what they only just accept: `refusals.txt` has one line per request.

A line names the model, the request in Python, and "accepted" or the code and the words of the
error. A request is a task, inputs, parameters, and changes of the limits if there are any. To
accept other words, run this test with ``REWRITE_WORDING=1`` and read the difference.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cloze.service.errors import RequestError
from cloze.service.tasks import TASKS, rerank
from cloze.service.tasks.task import Task
from cloze.service.tasks.token_ids import DECODE, TOKENIZE
from tests.support.refusals import check_table
from tests.support.task_model import CONTEXT, ID, LABELS, MASK, VOCABULARY, context, manifest

ALL: dict[str, Task] = {**TASKS, "rerank": rerank.TASK, "tokenize": TOKENIZE, "decode": DECODE}

EMBEDDING = {
    "dimensions": 4, "pooling": "mean", "normalize": True, "max_tokens": 10, "projected": False,
}  # fmt: skip
LATE = {
    "dimensions": 2, "query_marker": ID["?"], "document_marker": ID["!"], "query_tokens": 7,
    "document_tokens": 8, "filling": MASK, "skipped_ids": [ID["."], ID[","]],
}  # fmt: skip


def without(task: str) -> list[str]:
    return [each for each in manifest().tasks if each != task]


def classifier(*labels: str) -> dict[str, Any]:
    """Return the heads of a model with these labels of texts."""
    head = {"labels": labels, "problem_type": "single_label_classification"}
    return {"sequence_classification": head, "token_classification": {"labels": LABELS}}


MODELS = {
    "tiny": CONTEXT,
    "no prompts": context(embedding=EMBEDDING),
    "projected": context(embedding=EMBEDDING | {"projected": True}),
    "perhaps projected": context(embedding=EMBEDDING | {"projected": None}),
    "first token": context(embedding=EMBEDDING | {"pooling": "cls"}),
    "three layers": context(architecture=manifest().architecture.model_dump() | {"layers": 3}),
    "no layers": context(tasks=without("embed-layers")),
    "no tokens": context(tasks=without("embed-all")),
    "ranks": context(heads=classifier("relevance")),
    "entails": context(heads=classifier("ENTAILMENT", "neutral", "contradiction")),
    "late": context(tasks=["multi-vector"], embedding=None, heads={"multi_vector": LATE}),
}


def outcome(model: str, request: str) -> str:
    name, inputs, parameters, *limits = eval(request, {"VOCABULARY": len(VOCABULARY)})
    task, served = ALL[name], MODELS[model]
    if limits:
        served = replace(served, limits=replace(served.limits, **limits[0]))
    validated = TypeAdapter(task.inputs).validate_python(inputs)
    try:
        task.prepare(validated, task.parameters.model_validate(parameters), served)
    except RequestError as error:
        return f"{error.code} | {error}"
    return "accepted"


def test_what_is_refused_and_what_is_just_accepted() -> None:
    check_table(Path(__file__).with_name("refusals.txt"), outcome)
