"""What front ends and engine processes send each other: int32 and float32 arrays behind short headers; no code comes with them.

A message is a list of frames, the first its kind. To an engine, the second being where the front end listens for answers:

    hello
    run      header (id, deadline, model, whether it came before a drain), the queries
    cancel   id

To a front end:

    welcome  JSON: the engine's process id, and of each model how it runs
    done     header (id, seconds queued, seconds run), the outputs' shapes and ids, the outputs' numbers
    fail     id, JSON: the error

Both sides are processes of one release on one machine: there is no version, and byte order is the machine's.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service import core
from service.core import Answer, Output, Query, ServiceError

Frames = list[bytes]

HELLO, RUN, CANCEL, WELCOME, DONE, FAIL = b"hello", b"run", b"cancel", b"welcome", b"done", b"fail"

_RUN = struct.Struct("=Qdi?")
_DONE = struct.Struct("=Qdd")
_ID = struct.Struct("=Q")

_FIELDS = tuple(field.name for field in fields(Output))
_IDS = "top_ids"
"""The one field of integers."""

_NONE = (-1, 0, 0)


@dataclass(frozen=True, slots=True)
class Run:
    """What a front end asks of an engine.

    Attributes:
        number: the front end's own, for the answer.
        deadline: `time.monotonic` time, which all processes of a machine share.
        model: the index of it.
        accepted: whether the request came before a drain.
        queries: at least one.
    """

    number: int
    deadline: float
    model: int
    accepted: bool
    queries: list[Query]


def encode_run(run: Run) -> Frames:
    """The message."""
    heads = [(len(query), query.top_k, query.pair, query.embed, len(query.masks), len(query.targets)) for query in run.queries]
    parts = [np.array([len(heads)], np.int32), np.array(heads, np.int32).ravel()]
    for query in run.queries:
        parts += [query.input_ids, query.token_type_ids, np.array(query.masks, np.int32), np.array(query.targets, np.int32)]
    return [RUN, _RUN.pack(run.number, run.deadline, run.model, run.accepted), np.concatenate(parts).tobytes()]


def decode_run(frames: Sequence[bytes]) -> Run:
    """What `encode_run` made."""
    number, deadline, model, accepted = _RUN.unpack(frames[1])
    numbers = np.frombuffer(frames[2], np.int32)
    count = int(numbers[0])
    heads = numbers[1 : 1 + 6 * count].reshape(count, 6).tolist()
    rest = _Reader(numbers[1 + 6 * count :])
    queries = []
    for length, top_k, pair, embed, masks, targets in heads:
        query = Query(rest.take(length), rest.take(length), (), top_k, (), bool(pair), bool(embed))
        if masks:
            query.masks = rest.take(masks).tolist()
        if targets:
            query.targets = rest.take(targets).tolist()
        queries.append(query)
    return Run(number, deadline, model, accepted, queries)


def encode_done(number: int, answer: Answer) -> Frames:
    """The message: of each field of `Output` in turn, each output's array."""
    count = len(answer.outputs)
    shapes = np.zeros((len(_FIELDS), count, 3), np.int32)  # dimensions, or -1 for no array, and two sizes
    ids: list[NDArray[np.int32]] = []
    numbers: list[NDArray[np.float32]] = []
    for name, its_shapes in zip(_FIELDS, shapes, strict=True):
        arrays = [getattr(output, name) for output in answer.outputs]
        there = [array.ravel() for array in arrays if array is not None]
        (ids if name == _IDS else numbers).extend(there)
        its_shapes[:] = [_NONE if array is None else (array.ndim, *array.shape, 0)[:3] for array in arrays] if there else _NONE
    head = [np.array([count], np.int32), shapes.ravel()]
    integers = np.concatenate([*head, *(array.astype(np.int32) for array in ids)])
    floats = np.concatenate(numbers).astype(np.float32, copy=False) if numbers else np.zeros(0, np.float32)
    return [DONE, _DONE.pack(number, answer.queue_s, answer.inference_s), integers.tobytes(), floats.tobytes()]


def decode_done(frames: Sequence[bytes]) -> tuple[int, Answer]:
    """What `encode_done` made: the request's number, and its answer."""
    number, queue_s, inference_s = _DONE.unpack(frames[1])
    integers, floats = np.frombuffer(frames[2], np.int32), _Reader(np.frombuffer(frames[3], np.float32))
    count = int(integers[0])
    end = 1 + 3 * len(_FIELDS) * count
    shapes, ids = integers[1:end].reshape(len(_FIELDS), count, 3), _Reader(integers[end:])
    outputs = [Output() for _ in range(count)]
    for name, its_shapes in zip(_FIELDS, shapes, strict=True):
        if (its_shapes[:, 0] < 0).all():
            continue
        source = ids if name == _IDS else floats
        for output, (dimensions, rows, columns) in zip(outputs, its_shapes.tolist(), strict=True):
            if dimensions < 0:
                continue
            array = source.take(rows) if dimensions == 1 else source.take(rows * columns).reshape(rows, columns)
            setattr(output, name, array.astype(np.int64) if name == _IDS else array)
    return number, Answer(outputs, queue_s, inference_s)


def encode_fail(number: int, error: ServiceError) -> Frames:
    """The message."""
    told = {"error": type(error).__name__, "message": str(error), "retry_after_s": getattr(error, "retry_after_s", None)}
    return [FAIL, _ID.pack(number), json.dumps(told).encode()]


def decode_fail(frames: Sequence[bytes]) -> tuple[int, ServiceError]:
    """What `encode_fail` made: the request's number, and the same error."""
    told = json.loads(frames[2])
    kind: type[ServiceError] = getattr(core, told["error"])
    assert issubclass(kind, ServiceError)
    error = kind(told["message"], told["retry_after_s"]) if kind is core.Overloaded else kind(told["message"])
    return _ID.unpack(frames[1])[0], error


def encode_cancel(number: int) -> Frames:
    """The message."""
    return [CANCEL, _ID.pack(number)]


def decode_cancel(frames: Sequence[bytes]) -> int:
    """What `encode_cancel` made: the request's number."""
    number: int = _ID.unpack(frames[1])[0]
    return number


class _Reader:
    """Takes arrays from the front of another, without copying."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array, self._at, self._size = array, 0, len(array)

    def take(self, count: int) -> NDArray[Any]:
        begin = self._at
        self._at += count
        assert self._at <= self._size
        return self._array[begin : self._at]
