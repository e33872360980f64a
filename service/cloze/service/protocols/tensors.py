"""The inputs and results of a task as named tensors, and tensors as bytes.

The tensors follow from the types of a task, so that a task needs no entry here:

- An input tensor for each field of the task's inputs: ``text`` where a task takes texts, else the
  fields of its objects, such as ``question`` and ``context``.
- A task of vectors has the outputs ``embedding`` [n, D], and ``count`` [n]: the vectors of each
  input. Other tasks have ``result`` [n], the JSON of each input's result, and the columns of its
  entries, such as ``label`` and ``score`` [m], of which ``count`` [n] belong to each input.

The bytes have the binary extension of the Open Inference Protocol. The body is JSON, whose length a
header states, and then the bytes of its binary tensors in their order. Numbers are little-endian.
Each text is its length, 4 bytes, and its UTF-8. Source: Triton Inference Server,
``docs/protocol/extension_binary_data.md``.
"""

import struct
from base64 import b64decode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import numpy as np
import orjson
from numpy.typing import NDArray

from cloze.service import errors
from cloze.service.tasks import Task
from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.wire import WireModel

_DATATYPES: Final[Mapping[Any, str]] = {str: "BYTES", float: "FP32", int: "INT64"}

Data = list[str] | NDArray[Any]
"""The data of a tensor: texts [n], or an array of float32 or int64."""


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """The name and type of a tensor; -1 in the shape is any size."""

    name: str
    datatype: str
    shape: list[int]


class TaskTensors:
    """The tensors of one task.

    Attributes:
        inputs: the metadata of the input tensors, the required ones first.
        outputs: the metadata of the output tensors.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        types = list(_walk(task.inputs))
        models = [kind for kind in types if isinstance(kind, type) and issubclass(kind, WireModel)]
        lists = [_list_field(model) for model in models]
        self._takes_texts = str in types
        self._model: type[WireModel] | None = None
        self._listed: str | None = None  # the field of a single object that is a list
        self._required, optional = ["text"], list[str]()
        if models:
            chosen = lists.index(None) if None in lists else 0
            self._model, self._listed = models[chosen], lists[chosen]
            described = self._model.model_fields
            self._required = [name for name, field in described.items() if field.is_required()]
            optional = [name for name in described if name not in self._required]
        self.inputs = [TensorMetadata(name, "BYTES", [-1]) for name in self._required + optional]
        self._columns = {} if task.vectors else _columns(task)
        self.outputs = [TensorMetadata("result", "BYTES", [-1])]
        if task.vectors:
            self.outputs = [TensorMetadata("embedding", "FP32", [-1, -1])]
        columns = {"count": "INT64"} if task.vectors or self._columns else {}
        columns |= self._columns
        self.outputs += [TensorMetadata(name, kind, [-1]) for name, kind in columns.items()]

    def to_inputs(self, tensors: Mapping[str, list[str]]) -> Any:
        """Return the inputs of a call of the task; the texts of each tensor are by its name.

        Raises:
            InvalidRequest: a tensor is missing or unknown, or the lengths differ.
            EmptyRequest: a tensor has no text.
        """
        task, allowed = self._task.name, [tensor.name for tensor in self.inputs]
        for name in tensors:
            if name not in allowed:
                problem = f"has a tensor {errors.quoted(name)}; {task} takes {', '.join(allowed)}"
                raise errors.InvalidRequest(problem, INPUTS)
        for name in self._required:
            if name not in tensors:
                raise errors.InvalidRequest(f"lacks the tensor {name}; {task} needs it", INPUTS)
            if not tensors[name]:
                raise errors.EmptyRequest(
                    "is empty; it needs at least 1 text", errors.Location((name,))
                )
        if self._model is None or (self._takes_texts and tensors.keys() == {"text"}):
            return tensors["text"]
        if self._listed is not None:
            values: dict[str, Any] = dict(tensors)
            for name, texts in tensors.items():
                if name != self._listed:
                    if len(texts) != 1:
                        problem = f"has {len(texts)} texts; it needs exactly 1"
                        raise errors.InvalidRequest(problem, errors.Location((name,)))
                    values[name] = texts[0]
            return self._model.model_construct(**values)
        lengths = {name: len(texts) for name, texts in tensors.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise errors.InvalidRequest(f"the tensors have different numbers of texts: {shown}")
        make = self._model.model_construct
        rows = zip(*tensors.values(), strict=True)
        return [make(**dict(zip(tensors, row, strict=True))) for row in rows]

    def to_outputs(self, value: Any, asked: Collection[str], inputs: int) -> dict[str, Data]:
        """Return the data of the output tensors of the value of `Task.decode` for some inputs.

        If no names are asked for, the result has all but the columns that no entry has.
        """
        tensors: dict[str, Data]
        if self._task.vectors:  # [m, D] of all inputs, or a list with [S, D] of each input
            several = isinstance(value, list)
            counts = [*map(len, value)] if several else [len(value) // inputs] * inputs
            vectors = np.concatenate(value) if several else value
            tensors = {
                "embedding": vectors.astype("<f4", copy=False),
                "count": np.array(counts, np.int64),
            }
        else:
            texts = [orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY).decode() for row in value]
            tensors = {"result": texts}
            if self._columns:
                entries = [list(_entries(orjson.loads(text))) for text in texts]
                tensors["count"] = np.array([len(row) for row in entries], np.int64)
                flat = [entry for row in entries for entry in row]
                for name, kind in self._columns.items():
                    if asked or any(name in entry for entry in flat):
                        tensors[name] = _column([entry.get(name) for entry in flat], kind)
        return {name: data for name, data in tensors.items() if not asked or name in asked}


def _list_field(model: type[WireModel]) -> str | None:
    """Return the first field of an object that is a list; None if there is none."""
    for name, field in model.model_fields.items():
        if any(get_origin(kind) is list for kind in _walk(field.annotation)):
            return name
    return None


def _columns(task: Task) -> dict[str, str]:
    """Return the columns of the entries of a task's results, and their datatypes."""
    kinds = list(_walk(task.result))
    entries = [kind for kind in kinds if is_dataclass(kind)]
    if not entries:
        return {"score": "FP32"} if float in kinds else {}
    types = {field.name: field.type for kind in entries for field in fields(kind)}
    texts = {name: str if get_origin(kind) is Literal else kind for name, kind in types.items()}
    return {name: _DATATYPES[kind] for name, kind in texts.items() if kind in _DATATYPES}


def _walk(annotation: Any) -> Iterator[Any]:
    """Yield a type and all types that it consists of, the outer ones first."""
    yield annotation
    parts = get_args(annotation)
    for part in parts[:1] if get_origin(annotation) is Annotated else parts:
        yield from _walk(part)


def _entries(result: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of one input's result; a number is an object with a score."""
    if isinstance(result, list):
        for part in result:
            yield from _entries(part)
    else:
        yield result if isinstance(result, dict) else {"score": result}


def _column(values: Sequence[Any], datatype: str) -> Data:
    """Return a field of all entries; an entry that lacks the field has "" or 0 there."""
    if datatype == "BYTES":
        return ["" if value is None else str(value) for value in values]
    number = np.float32 if datatype == "FP32" else np.int64
    return np.array([value or 0 for value in values], number)


JSON_LENGTH: Final = "inference-header-content-length"
"""The header with the length of the JSON."""

_LENGTH: Final = struct.Struct("<I")


def split(data: bytes, length: bytes | None) -> tuple[bytes, memoryview]:
    """Return the JSON and the bytes of the tensors of a body.

    The length is the value of `JSON_LENGTH`; None: the body is JSON.

    Raises:
        MalformedRequest: the header is no length within the body.
    """
    if length is None:
        return data, memoryview(b"")
    size = int(length) if length.isdigit() and len(length) < 16 else -1
    if not 0 < size <= len(data):
        raise errors.MalformedRequest(
            f"{JSON_LENGTH}: a whole number from 1 to the {len(data)} bytes of the body, "
            f"got {ascii(length.decode('latin-1'))[:40]}"
        )
    return data[:size], memoryview(data)[size:]


def read_texts(data: memoryview, at: errors.Location, most: int) -> list[str]:
    """Return the texts of the binary tensor at a location.

    Raises:
        InvalidRequest: the bytes are cut, a text is not UTF-8, or there are more texts than `most`.
    """
    texts: list[str] = []
    end = 0
    while end < len(data):
        if len(texts) == most:
            raise errors.TooMany(f"has over {most} texts, the limit", at)
        begin = end + _LENGTH.size
        end = begin + _LENGTH.unpack_from(data, end)[0] if begin <= len(data) else begin
        if end > len(data):
            raise errors.InvalidRequest(f"ends within text {len(texts)}", at)
        try:
            texts.append(str(data[begin:end], "utf-8"))
        except UnicodeDecodeError:
            raise errors.InvalidRequest(
                f"has a text, {len(texts)}, that is not UTF-8", at
            ) from None
    return texts


def decode_content(
    elements: list[str], kind: str | None, at: errors.Location, load: Callable[[bytes], Any]
) -> list[str]:
    """Return the texts of elements with a content type of MLServer's codecs; ``load`` reads JSON.

    Raises:
        InvalidRequest: there is no such content type, or the elements are not of it.
    """
    if kind in (None, "str", "np", "raw"):
        return elements
    try:
        if kind == "base64":
            return [b64decode(element, validate=True).decode() for element in elements]
        if kind not in ("hg_json", "hg_jsonlist", "json"):
            problem = f"has the content_type {errors.quoted(str(kind))}; there are str, np, raw, "
            raise errors.InvalidRequest(f"{problem}base64, hg_json, hg_jsonlist and json", at)
        values = load(f"[{','.join(elements)}]".encode())  # at once, for its limit of values
        texts = [t for value in values for t in (value if isinstance(value, list) else [value])]
    except (ValueError, errors.MalformedRequest):
        texts = [None]
    if not all(isinstance(text, str) for text in texts):
        raise errors.InvalidRequest(f"has the content_type {kind}, but not of texts", at)
    return texts


def classes(rows: Sequence[Any], labels: Sequence[str], most: int) -> list[str]:
    """Return ``score:index:label`` of the best labels of each input, with their index in the model.

    Source: Triton Inference Server, ``docs/protocol/extension_classification.md``.
    """
    numbers = {label: number for number, label in enumerate(labels)}
    best = [entry for row in rows for entry in sorted(row, key=lambda each: -each.score)[:most]]
    return [f"{entry.score:f}:{numbers[entry.label]}:{entry.label}" for entry in best]


def write_tensor(data: Data) -> bytes:
    """Return the bytes of a tensor."""
    if not isinstance(data, list):
        return data.astype(data.dtype.newbyteorder("<"), copy=False).tobytes()
    return b"".join(_LENGTH.pack(len(text)) + text for text in map(str.encode, data))
