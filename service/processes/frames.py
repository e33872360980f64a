"""The messages between front ends and engine processes, as bytes.

A message is a list of byte strings: a kind, a header in MessagePack, and the arrays as they lie in
memory. Both sides are processes of one release on one machine: messages carry no version, and
byte order is the machine's. Requests and results of any head cross without code of their own:
they are dataclasses of numbers, lists and arrays.

To an engine: ``run`` and ``cancel``. To a front end: ``done`` and ``fail``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from model_store.batch import Encoding, HeadOutputs
from model_store.heads import HEADS
from service import core
from service.core import BatchResult, ServiceError

Frames = list[bytes]

HELLO, WELCOME = b"hello", b"welcome"
RUN, CANCEL, DONE, FAIL = b"run", b"cancel", b"done", b"fail"

_REQUESTS = {name: msgspec.msgpack.Decoder(head.request) for name, head in HEADS.items()}
_FIELDS = {name: [field.name for field in fields(head.result)] for name, head in HEADS.items()}


@dataclass(frozen=True, slots=True)
class Run:
    """What a front end asks of an engine.

    Attributes:
        number: the front end's own, for the answer.
        deadline: `time.monotonic` time, which all processes of a machine share.
        model: index of the served model.
        accepted: whether the request arrived before a drain.
        encodings: at least one.
    """

    number: int
    deadline: float
    model: int
    accepted: bool
    encodings: list[Encoding]


class _RunHeader(msgspec.Struct, array_like=True, gc=False):
    number: int
    deadline: float
    model: int
    accepted: bool
    lengths: list[int]
    requests: list[dict[str, msgspec.Raw]]  # the distinct ones
    request_of: list[int]  # index into `requests`, per encoding


class _Column(msgspec.Struct, array_like=True, gc=False):
    """One field of one head's results: an array per encoding that has a result."""

    head: str
    field: str
    dtype: str
    encodings: list[int]
    shapes: list[list[int]]  # a single one if all arrays have one shape


class _DoneHeader(msgspec.Struct, array_like=True, gc=False):
    number: int
    queue_s: float
    inference_s: float
    encodings: int
    columns: list[_Column]


class _FailHeader(msgspec.Struct, array_like=True, gc=False):
    number: int
    error: str
    message: str
    retry_after_s: int | None


_encoder = msgspec.msgpack.Encoder()
_run_header = msgspec.msgpack.Decoder(_RunHeader)
_done_header = msgspec.msgpack.Decoder(_DoneHeader)
_fail_header = msgspec.msgpack.Decoder(_FailHeader)
_number = msgspec.msgpack.Decoder(int)


def encode_run(run: Run) -> Frames:
    """Return the message of a run."""
    encodings = run.encodings
    distinct: dict[int, tuple[int, Mapping[str, Any]]] = {}  # by identity: encodings share them
    request_of = [
        distinct.setdefault(id(e.requests), (len(distinct), e.requests))[0] for e in encodings
    ]
    header = [
        run.number,
        run.deadline,
        run.model,
        run.accepted,
        [len(encoding) for encoding in encodings],
        [requests for _, requests in distinct.values()],
        request_of,
    ]
    ids = np.concatenate([encoding.input_ids for encoding in encodings])
    types = np.concatenate([encoding.token_type_ids for encoding in encodings])
    return [RUN, _encoder.encode(header), ids.tobytes(), types.tobytes()]


def decode_run(frames: Sequence[bytes]) -> Run:
    """Return what `encode_run` was given."""
    header = _run_header.decode(frames[1])
    ids, types = np.frombuffer(frames[2], np.int32), np.frombuffer(frames[3], np.int32)
    requests = [
        {name: _REQUESTS[name].decode(raw) for name, raw in by_head.items()}
        for by_head in header.requests
    ]
    bounds = pairwise(accumulate(header.lengths, initial=0))
    encodings = [
        Encoding(ids[first:end], types[first:end], requests[index])
        for (first, end), index in zip(bounds, header.request_of, strict=True)
    ]
    return Run(header.number, header.deadline, header.model, header.accepted, encodings)


def encode_done(number: int, result: BatchResult) -> Frames:
    """Return the message of a result."""
    columns: list[_Column] = []
    arrays: list[bytes] = []
    for head, names in _FIELDS.items():
        asked = [index for index, output in enumerate(result.outputs) if head in output]
        for name in names if asked else ():
            values = [getattr(result.outputs[index][head], name) for index in asked]
            shapes = [list(value.shape) for value in values]
            if all(shape == shapes[0] for shape in shapes):
                shapes = shapes[:1]
            columns.append(_Column(head, name, values[0].dtype.name, asked, shapes))
            arrays.append(b"".join([value.tobytes() for value in values]))
    header = _DoneHeader(number, result.queue_s, result.inference_s, len(result.outputs), columns)
    return [DONE, _encoder.encode(header), *arrays]


def decode_done(frames: Sequence[bytes]) -> tuple[int, BatchResult]:
    """Return the request's number and what `encode_done` was given."""
    header = _done_header.decode(frames[1])
    outputs: list[dict[str, Any]] = [{} for _ in range(header.encodings)]
    columns: dict[str, tuple[list[int], list[Sequence[NDArray[Any]]]]] = {}
    for column, data in zip(header.columns, frames[2:], strict=True):
        _, values = columns.setdefault(column.head, (column.encodings, []))
        values.append(_split(column, data))
    for head, (encodings, values) in columns.items():
        result = HEADS[head].result
        for index, row in zip(encodings, zip(*values, strict=True), strict=True):
            outputs[index][head] = result(*row)
    done: list[HeadOutputs] = list(outputs)
    return header.number, BatchResult(done, header.queue_s, header.inference_s)


def _split(column: _Column, data: bytes) -> Sequence[NDArray[Any]]:
    """Return the column's array of each encoding, without copying."""
    array: NDArray[Any] = np.frombuffer(data, column.dtype)
    if len(column.shapes) == 1:
        return list(array.reshape(len(column.encodings), *column.shapes[0]))
    sizes = [int(np.prod(shape)) for shape in column.shapes]
    bounds = pairwise(accumulate(sizes, initial=0))
    return [
        array[first:end].reshape(shape)
        for (first, end), shape in zip(bounds, column.shapes, strict=True)
    ]


def encode_fail(number: int, error: ServiceError) -> Frames:
    """Return the message of an error."""
    retry_after_s = error.retry_after_s if isinstance(error, core.Overloaded) else None
    header = _FailHeader(number, type(error).__name__, str(error), retry_after_s)
    return [FAIL, _encoder.encode(header)]


def decode_fail(frames: Sequence[bytes]) -> tuple[int, ServiceError]:
    """Return the request's number and the error that `encode_fail` was given."""
    header = _fail_header.decode(frames[1])
    kind: type[ServiceError] = getattr(core, header.error)
    assert issubclass(kind, ServiceError)
    if kind is core.Overloaded:
        return header.number, core.Overloaded(header.message, header.retry_after_s or 1)
    return header.number, kind(header.message)


def encode_cancel(number: int) -> Frames:
    """Return the message that a request is cancelled."""
    return [CANCEL, _encoder.encode(number)]


def decode_cancel(frames: Sequence[bytes]) -> int:
    """Return the number of a cancelled request."""
    return _number.decode(frames[1])
