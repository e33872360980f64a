"""The tasks of bulk runs: which columns they read, and which column they write."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, get_type_hints

import pyarrow as pa

from cloze.service.tasks import TASKS, Task, TaskContext
from cloze.service.tasks.answer_spans import QaAnswer
from cloze.service.tasks.fill_tokens import Prediction
from cloze.service.tasks.qa import QaPair
from cloze.service.tasks.redact import Redaction, Replacement
from cloze.service.tasks.text_classification import LabelScore


@dataclass(frozen=True, slots=True)
class BulkTask:
    """A task of bulk runs.

    Attributes:
        inputs: names of the parts of an input.
        to_input: texts of a row -> an input of the task.
        to_values: result of a list of inputs -> one value per input, for the result column.
        probe: context -> an input that every model answers, to check the parameters.
    """

    task: Task
    inputs: tuple[str, ...]
    result: str
    type: pa.DataType
    to_input: Callable[[Sequence[str]], Any]
    to_values: Callable[[Any], list[Any]]
    probe: Callable[[TaskContext], Any]


def _first(texts: Sequence[str]) -> str:
    return texts[0]


def _pair(texts: Sequence[str]) -> QaPair:
    return QaPair(question=texts[0], context=texts[1])


def _masks(results: list[list[Any]]) -> list[Any]:
    """Return one list of predictions per mask, also for texts with one mask."""
    per_text = [[r] if r and isinstance(r[0], Prediction) else r for r in results]
    return [[list(map(asdict, mask)) for mask in masks] for masks in per_text]


def _labels(results: list[list[LabelScore]]) -> list[Any]:
    return [list(map(asdict, labels)) for labels in results]


def _redactions(results: list[Redaction]) -> list[Any]:
    return list(map(asdict, results))


def _answers(results: list[Any]) -> list[Any]:
    return [list(map(asdict, r if isinstance(r, list) else [r])) for r in results]


_ARROW_TYPES: Final = {str: pa.string(), float: pa.float64(), int: pa.int32()}


def _structs(kind: type) -> pa.DataType:
    """Return the Arrow type of a list of dataclasses."""
    return pa.list_(pa.struct({name: _ARROW_TYPES[t] for name, t in get_type_hints(kind).items()}))


BULK_TASKS: Final[dict[str, BulkTask]] = {
    "embed": BulkTask(
        TASKS["embed"],
        ("text",),
        "embedding",
        pa.list_(pa.float32()),
        _first,
        list,
        lambda _: "a",
    ),
    "fill-mask": BulkTask(
        TASKS["fill-mask"],
        ("text",),
        "predictions",
        pa.list_(_structs(Prediction)),
        _first,
        _masks,
        lambda context: context.tokenizer.mask_token,
    ),
    "classify": BulkTask(
        TASKS["text-classification"],
        ("text",),
        "labels",
        _structs(LabelScore),
        _first,
        _labels,
        lambda _: "a",
    ),
    "zero-shot-classification": BulkTask(
        TASKS["zero-shot-classification"],
        ("text",),
        "labels",
        _structs(LabelScore),
        _first,
        _labels,
        lambda _: "a",
    ),
    "redact": BulkTask(
        TASKS["redact"],
        ("text",),
        "redacted",
        pa.struct({"text": pa.string(), "replacements": _structs(Replacement)}),
        _first,
        _redactions,
        lambda _: "a",
    ),
    "qa": BulkTask(
        TASKS["qa"],
        ("question", "context"),
        "answers",
        _structs(QaAnswer),
        _pair,
        _answers,
        lambda _: QaPair(question="a", context="a"),
    ),
}
"""The tasks by the names of their commands."""
