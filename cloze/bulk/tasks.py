"""The tasks of bulk runs: which columns they read, and which column they write."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, Final, get_type_hints

import pyarrow as pa

from cloze.service.tasks import TASKS, Task, TaskContext
from cloze.service.tasks.answer_spans import QaAnswer
from cloze.service.tasks.entities import Entity
from cloze.service.tasks.fill_tokens import Prediction
from cloze.service.tasks.qa import QaPair
from cloze.service.tasks.redact import Replacement
from cloze.service.tasks.text_classification import LabelScore


@dataclass(frozen=True, slots=True)
class BulkTask:
    """A task of bulk runs.

    Attributes:
        to_values: result of a list of inputs -> one value per input, for the result column.
        inputs: names of the parts of an input.
        to_input: texts of a row -> an input of the task.
        probe: context -> an input that every model answers, to check the parameters.
    """

    task: Task
    result: str
    type: pa.DataType
    to_values: Callable[[Any], list[Any]]
    inputs: tuple[str, ...] = ("text",)
    to_input: Callable[[Sequence[str]], Any] = itemgetter(0)
    probe: Callable[[TaskContext], Any] = lambda _: "a"


def _pair(texts: Sequence[str]) -> QaPair:
    return QaPair(question=texts[0], context=texts[1])


def _masks(results: list[list[Any]]) -> list[Any]:
    """Return one list of predictions per mask, also for texts with one mask."""
    per_text = [[r] if r and isinstance(r[0], Prediction) else r for r in results]
    return [_lists(masks) for masks in per_text]


def _lists(results: list[Any]) -> list[Any]:
    """Return one list per text, also for texts with one result."""
    return [list(map(asdict, r if isinstance(r, list) else [r])) for r in results]


def _values(results: list[Any]) -> list[Any]:
    return list(map(asdict, results))


_ARROW_TYPES: Final = {str: pa.string(), float: pa.float64(), int: pa.int32()}


def _structs(kind: type) -> pa.DataType:
    """Return the Arrow type of a list of dataclasses."""
    return pa.list_(pa.struct({name: _ARROW_TYPES[t] for name, t in get_type_hints(kind).items()}))


BULK_TASKS: Final[dict[str, BulkTask]] = {
    "embed": BulkTask(TASKS["embed"], "embedding", pa.list_(pa.float32()), list),
    "fill-mask": BulkTask(
        TASKS["fill-mask"],
        "predictions",
        pa.list_(_structs(Prediction)),
        _masks,
        probe=lambda context: context.tokenizer.mask_token,
    ),
    "classify": BulkTask(TASKS["text-classification"], "labels", _structs(LabelScore), _lists),
    "zero-shot-classification": BulkTask(
        TASKS["zero-shot-classification"], "labels", _structs(LabelScore), _lists
    ),
    "entities": BulkTask(TASKS["entities"], "entities", _structs(Entity), _lists),
    "redact": BulkTask(
        TASKS["redact"],
        "redacted",
        pa.struct({"text": pa.string(), "replacements": _structs(Replacement)}),
        _values,
    ),
    "qa": BulkTask(
        TASKS["qa"],
        "answers",
        _structs(QaAnswer),
        _lists,
        ("question", "context"),
        _pair,
        lambda _: QaPair(question="a", context="a"),
    ),
}
"""The tasks by the names of their commands."""
