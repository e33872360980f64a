"""How the inputs and results of a task become named tensors, for the Open Inference Protocol.

The tensors follow from the types of a task, so that a task needs no entry here:

- An input tensor for each field of the task's inputs: ``text`` where a task takes texts, else the
  fields of its objects, such as ``question`` and ``context``.
- A task of vectors has the output ``embedding`` [n, D], and ``count`` [n] if an input has several
  vectors. Other tasks have ``result`` [n], the JSON of each input's result, and the columns of its
  entries, such as ``label`` and ``score`` [m], of which ``count`` [n] belong to each input.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin

import numpy as np
import orjson
from numpy.typing import NDArray

from cloze.service.core import EmptyRequest, InvalidRequest
from cloze.service.tasks import Task
from cloze.service.tasks.task import WireModel

TEXT: Final = "text"
"""The input tensor of tasks that take texts."""

COUNT: Final = "count"
RESULT: Final = "result"
EMBEDDING: Final = "embedding"

_DATATYPES: Final[Mapping[Any, str]] = {str: "BYTES", float: "FP32", int: "INT64"}


class TensorInfo(NamedTuple):
    """The metadata of a tensor; -1 in its shape is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Tensor(NamedTuple):
    """A tensor of an answer; the data are texts if the datatype is BYTES.

    Attributes:
        name: name of the tensor.
        datatype: BYTES, FP32 or INT64.
        data: texts [n], or an array.
    """

    name: str
    datatype: str
    data: list[str] | NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data."""
        return (len(self.data),) if isinstance(self.data, list) else self.data.shape


@dataclass(frozen=True, slots=True)
class InputFields:
    """The input tensors of a task.

    Attributes:
        model: the type of the task's objects; None if it takes texts only.
        takes_texts: whether the task takes texts.
        required: names of the tensors that a request needs.
        optional: names of further tensors.
        listed: the tensor that is one field of a single object, a list; None: a row of each tensor
            makes one object.
    """

    model: type[WireModel] | None
    takes_texts: bool
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    listed: str | None = None


class TaskTensors:
    """The tensors of one task.

    Args:
        task: the task.

    Attributes:
        inputs: the metadata of the input tensors, the required ones first.
        outputs: the metadata of the output tensors.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._fields = _input_fields(task)
        self._columns = _columns(task)
        names = (*self._fields.required, *self._fields.optional)
        self.inputs = [TensorInfo(name, "BYTES", (-1,)) for name in names]
        count = TensorInfo(COUNT, "INT64", (-1,))
        if task.vectors:
            self.outputs = [TensorInfo(EMBEDDING, "FP32", (-1, -1)), count]
        else:
            self.outputs = [TensorInfo(RESULT, "BYTES", (-1,))]
            if self._columns:
                columns = (TensorInfo(name, kind, (-1,)) for name, kind in self._columns.items())
                self.outputs += [count, *columns]

    def to_inputs(self, tensors: Mapping[str, list[str]]) -> Any:
        """Return the inputs of a call of the task.

        Args:
            tensors: the texts of each tensor, by name.

        Raises:
            InvalidRequest: a tensor is missing or unknown, or the lengths differ.
            EmptyRequest: a tensor has no text.
        """
        known, name = self._fields, self._task.name
        allowed = (*known.required, *known.optional)
        for given in tensors:
            if given not in allowed:
                raise InvalidRequest(
                    f"inputs has a tensor {ascii(given)[:80]}; {name} takes {', '.join(allowed)}"
                )
        for needed in known.required:
            if needed not in tensors:
                raise InvalidRequest(f"inputs lacks the tensor {needed}; {name} needs it")
            if not tensors[needed]:
                raise EmptyRequest(f"{needed} is empty; it needs at least 1 text")
        if known.model is None or (known.takes_texts and tensors.keys() == {TEXT}):
            return tensors[TEXT]
        if known.listed is not None:
            return _one_object(known, known.model, tensors)
        lengths = {given: len(texts) for given, texts in tensors.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{given} {length}" for given, length in lengths.items())
            raise InvalidRequest(f"the tensors have different numbers of texts: {shown}")
        rows = zip(*tensors.values(), strict=True)
        objects: Iterator[dict[str, Any]] = (dict(zip(tensors, row, strict=True)) for row in rows)
        return [known.model.model_construct(**values) for values in objects]

    def to_outputs(self, value: Any, asked: Collection[str] | None, inputs: int) -> list[Tensor]:
        """Return the output tensors of a result, in the order of `outputs`.

        Args:
            value: the return value of `Task.decode` for a list of inputs.
            asked: names of the tensors to return; None: all, without the columns that no entry has.
            inputs: number of the inputs.
        """
        if self._task.vectors:
            tensors = _vectors(value, inputs)
            return tensors if asked is None else [t for t in tensors if t.name in asked]
        results = [orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY).decode() for row in value]
        tensors = [Tensor(RESULT, "BYTES", results)]
        if self._columns:
            entries = [list(_entries(orjson.loads(row))) for row in results]
            counts = np.array([len(row) for row in entries], np.int64)
            flat = [entry for row in entries for entry in row]
            tensors.append(Tensor(COUNT, "INT64", counts))
            tensors += [
                _column(name, kind, flat)
                for name, kind in self._columns.items()
                if asked is not None or any(_has(entry, name) for entry in flat)
            ]
        return tensors if asked is None else [t for t in tensors if t.name in asked]


def _input_fields(task: Task) -> InputFields:
    types = list(_walk(task.inputs))
    models = [kind for kind in types if isinstance(kind, type) and issubclass(kind, WireModel)]
    takes_texts = str in types
    if not models:
        return InputFields(None, takes_texts, (TEXT,))
    lists = {model: _list_field(model) for model in models}
    model = next((model for model in models if lists[model] is None), models[0])
    described = model.model_fields
    required = tuple(name for name, field in described.items() if field.is_required())
    optional = tuple(name for name in described if name not in required)
    return InputFields(model, takes_texts, required, optional, lists[model])


def _list_field(model: type[WireModel]) -> str | None:
    """Return the first field of an object that is a list; None if there is none."""
    for name, field in model.model_fields.items():
        if any(get_origin(kind) is list for kind in _walk(field.annotation)):
            return name
    return None


def _one_object(
    known: InputFields, model: type[WireModel], tensors: Mapping[str, list[str]]
) -> WireModel:
    """Return the object of which one tensor is a list, and the others are texts.

    Raises:
        InvalidRequest: another tensor has several texts.
    """
    for name, texts in tensors.items():
        if name != known.listed and len(texts) != 1:
            raise InvalidRequest(f"{name} has {len(texts)} texts; it needs exactly 1")
    values: dict[str, Any] = {
        name: texts if name == known.listed else texts[0] for name, texts in tensors.items()
    }
    return model.model_construct(**values)


def _columns(task: Task) -> dict[str, str]:
    """Return the columns of the entries of a task's results, and their datatypes."""
    kinds = list(_walk(task.result))
    entries = [kind for kind in kinds if is_dataclass(kind)]
    if not entries:
        return {"score": "FP32"} if float in kinds else {}
    types = {field.name: _scalar(field.type) for kind in entries for field in fields(kind)}
    return {name: kind for name, kind in types.items() if kind is not None}


def _walk(annotation: Any) -> Iterator[Any]:
    """Yield a type and all types that it consists of, the outer ones first."""
    yield annotation
    parts = get_args(annotation)
    for part in parts[:1] if get_origin(annotation) is Annotated else parts:
        yield from _walk(part)


def _scalar(annotation: Any) -> str | None:
    """Return the datatype of a field; None if the field is neither a text nor a number."""
    if get_origin(annotation) is Literal:
        return "BYTES"
    return _DATATYPES.get(annotation)


def _vectors(value: Any, inputs: int) -> list[Tensor]:
    """Return the tensors of vectors, [m, D] of all inputs or a list with [S, D] of each input."""
    several = isinstance(value, list)
    counts = [len(rows) for rows in value] if several else [len(value) // inputs] * inputs
    vectors = np.concatenate(value) if several else value
    return [
        Tensor(EMBEDDING, "FP32", vectors.astype("<f4", copy=False)),
        Tensor(COUNT, "INT64", np.array(counts, np.int64)),
    ]


def _entries(result: Any) -> Iterator[Any]:
    """Yield the objects, or numbers, of one input's result."""
    if isinstance(result, list):
        for part in result:
            yield from _entries(part)
    else:
        yield result


def _has(entry: Any, name: str) -> bool:
    return not isinstance(entry, dict) or name in entry


def _column(name: str, datatype: str, entries: Sequence[Any]) -> Tensor:
    """Return a field of all entries; an entry that lacks the field has "" or 0 there."""
    values = [entry.get(name) if isinstance(entry, dict) else entry for entry in entries]
    if datatype == "BYTES":
        return Tensor(name, datatype, ["" if value is None else str(value) for value in values])
    number = np.float32 if datatype == "FP32" else np.int64
    return Tensor(name, datatype, np.array([value or 0 for value in values], number))
