"""The messages between front ends and engine processes, in MessagePack, over a Unix stream socket.

Both sides are processes of one release on one machine: messages carry no version, and the byte
order is the machine's. Requests and results of any head cross without code of their own: they are
dataclasses of numbers, lists and arrays. Decoded arrays are views of the message.

A peer is one of our own processes. So a malformed message is a fault of a process: to decode it
raises one of `MALFORMED`, and the receiver closes the connection.

To an engine: `Run` and `Cancel`. To a front end: `Greeting`, which is the engine's first message,
and `Answer`. A `Channel` sends and receives messages. On the wire, the length of a message in
bytes, as an unsigned 32-bit integer, precedes it. The end of the stream is the death of the peer.
"""

import asyncio
import logging
import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import HEADS
from cloze.service import core
from cloze.service.batching.fair_queue import NO_WAIT, ExpectedWait, Terms
from cloze.service.core import BatchResult, ServiceError

log = logging.getLogger("cloze")

MAX_MESSAGE_BYTES = 2**30
"""A longer message is malformed. The largest request that the defaults admit has 9 MB."""

_PREFIX = struct.Struct("=I")  # the length of a message

_REQUESTS = {name: msgspec.msgpack.Decoder(head.request) for name, head in HEADS.items()}
_FIELDS = {name: [field.name for field in fields(head.result)] for name, head in HEADS.items()}
_DTYPES = {dtype.name: dtype for dtype in map(np.dtype, "?bhilqBHILQefd")}
_ERRORS = {
    name: kind
    for name, kind in vars(core).items()
    if isinstance(kind, type) and issubclass(kind, ServiceError)
}

_Index = Annotated[int, msgspec.Meta(ge=0)]
_Length = Annotated[int, msgspec.Meta(ge=1)]

MALFORMED = (LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""What a malformed message raises while it is decoded; msgspec's errors are `ValueError`s."""


class Run(NamedTuple):
    """A submission of a front end, whose number its answer has. `model` is an index."""

    number: int
    model: int
    terms: Terms
    encodings: Sequence[Encoding]


class Answer(NamedTuple):
    """The answer to a request, and the expected wait of a further request like it."""

    number: int
    outcome: BatchResult | ServiceError
    wait: ExpectedWait = NO_WAIT


class Greeting(msgspec.Struct, tag="greeting", array_like=True, frozen=True):
    """The full names of the models of an engine process, in order, and the precisions that run."""

    models: dict[str, str]


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    """A front end no longer waits for a request."""

    number: int


class _Encodings(msgspec.Struct, array_like=True, gc=False):
    lengths: Annotated[list[_Length], msgspec.Meta(min_length=1)]
    requests: list[dict[str, msgspec.Raw]]  # the distinct ones
    request_of: list[_Index]  # index into `requests`, per encoding
    input_ids: memoryview
    token_type_ids: memoryview


class _Run(msgspec.Struct, tag="run", array_like=True, gc=False):
    number: int
    model: _Index
    terms: Terms
    encodings: _Encodings


class _Arrays(msgspec.Struct, array_like=True, gc=False):
    """One field of one head's results: an array per encoding that has a result."""

    dtype: str
    shapes: list[list[_Index]]  # a single one if all arrays have one shape
    data: memoryview


class _Results(msgspec.Struct, array_like=True, gc=False):
    """The results of one head: which encodings have one, and the fields, in order."""

    encodings: list[_Index]
    fields: list[_Arrays]


class _Done(msgspec.Struct, tag="done", array_like=True, gc=False):
    number: int
    queue_s: float
    inference_s: float
    encodings: _Length
    heads: dict[str, _Results]
    wait: ExpectedWait


class _Fail(msgspec.Struct, tag="fail", array_like=True, gc=False):
    number: int
    error: str
    message: str
    retry_after_s: float
    reason: str
    each_s: float
    wait: ExpectedWait


_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(_Run | Cancel)
_to_front_end = msgspec.msgpack.Decoder(Greeting | _Done | _Fail)


def encode(message: Greeting | Cancel) -> bytes:
    """Return a message without arrays."""
    return _encoder.encode(message)


def encode_run(run: Run) -> bytes:
    """Return the message of a request."""
    return _encoder.encode(_Run(run.number, run.model, run.terms, _pack(run.encodings)))


def encode_answer(answer: Answer) -> bytes:
    """Return the message of an answer."""
    number, outcome = answer.number, answer.outcome
    if isinstance(outcome, ServiceError):
        retry_after_s, reason, each_s = 0.0, "", 0.0
        if isinstance(outcome, core.Overloaded):
            retry_after_s, reason = outcome.retry_after_s, outcome.reason.value
            each_s = outcome.each_s
        kind = type(outcome).__name__
        return _encoder.encode(
            _Fail(number, kind, str(outcome), retry_after_s, reason, each_s, answer.wait)
        )
    heads: dict[str, _Results] = {}
    for head, names in _FIELDS.items():
        asked = [index for index, output in enumerate(outcome.outputs) if head in output]
        if asked:
            results = [outcome.outputs[index][head] for index in asked]
            fields = [_join([getattr(result, name) for result in results]) for name in names]
            heads[head] = _Results(asked, fields)
    count = len(outcome.outputs)
    done = _Done(number, outcome.queue_s, outcome.inference_s, count, heads, answer.wait)
    return _encoder.encode(done)


def decode_request(message: memoryview | bytes) -> Run | Cancel:
    """Return what a front end sent; raise one of `MALFORMED`."""
    decoded = _to_engine.decode(message)
    if isinstance(decoded, Cancel):
        return decoded
    return Run(decoded.number, decoded.model, decoded.terms, _unpack(decoded.encodings))


def _pack(encodings: Sequence[Encoding]) -> _Encodings:
    distinct: dict[int, tuple[int, Any]] = {}  # by identity: encodings share them
    request_of = [
        distinct.setdefault(id(e.requests), (len(distinct), e.requests))[0] for e in encodings
    ]
    return _Encodings(
        [len(encoding) for encoding in encodings],
        [requests for _, requests in distinct.values()],
        request_of,
        np.concatenate([encoding.input_ids for encoding in encodings]).data,
        np.concatenate([encoding.token_type_ids for encoding in encodings]).data,
    )


def _unpack(packed: _Encodings) -> list[Encoding]:
    ids = np.frombuffer(packed.input_ids, np.int32)
    types = np.frombuffer(packed.token_type_ids, np.int32)
    ends = list(accumulate(packed.lengths, initial=0))
    if not len(ids) == len(types) == ends[-1]:
        raise ValueError(f"{ends[-1]} tokens have {len(ids)} ids and {len(types)} types")
    requests = [
        {name: _REQUESTS[name].decode(raw) for name, raw in by_head.items()}
        for by_head in packed.requests
    ]
    return [
        Encoding(ids[first:end], types[first:end], requests[index])
        for (first, end), index in zip(pairwise(ends), packed.request_of, strict=True)
    ]


def decode_answer(message: memoryview | bytes) -> Greeting | Answer:
    """Return what an engine process sent; raise one of `MALFORMED`."""
    decoded = _to_front_end.decode(message)
    if isinstance(decoded, Greeting):
        return decoded
    if isinstance(decoded, _Fail):
        return Answer(decoded.number, _error(decoded), decoded.wait)
    if decoded.encodings > len(message):
        raise ValueError(f"{decoded.encodings} results do not fit in {len(message)} bytes")
    return Answer(decoded.number, _result(decoded), decoded.wait)


def _result(decoded: _Done) -> BatchResult:
    outputs: list[dict[str, Any]] = [{} for _ in range(decoded.encodings)]
    for head, results in decoded.heads.items():
        make, count = HEADS[head].result, len(results.encodings)
        rows = zip(*[_split(field, count) for field in results.fields], strict=True)
        for index, row in zip(results.encodings, rows, strict=True):
            outputs[index][head] = make(*row)
    done: list[HeadOutputs] = list(outputs)
    return BatchResult(done, decoded.queue_s, decoded.inference_s)


def _join(values: list[NDArray[Any]]) -> _Arrays:
    shapes = [list(value.shape) for value in values]
    if all(shape == shapes[0] for shape in shapes):
        shapes = shapes[:1]
    data = memoryview(b"".join([value.tobytes() for value in values]))
    return _Arrays(values[0].dtype.name, shapes, data)


def _split(field: _Arrays, count: int) -> Sequence[NDArray[Any]]:
    """Return the array of each encoding, without copying."""
    array = np.frombuffer(field.data, _DTYPES[field.dtype])
    if len(field.shapes) == 1:
        return list(array.reshape(count, *field.shapes[0]))
    sizes = list(map(math.prod, field.shapes))
    if sum(sizes) != len(array):
        raise ValueError(f"{len(array)} numbers do not have the shapes {field.shapes[:4]}")
    bounds = pairwise(accumulate(sizes, initial=0))
    return [
        array[first:end].reshape(shape)
        for (first, end), shape in zip(bounds, field.shapes, strict=True)
    ]


def _error(failed: _Fail) -> ServiceError:
    kind = _ERRORS[failed.error]
    if kind is core.Overloaded:
        reason = core.Rejection(failed.reason)
        return core.Overloaded(failed.message, failed.retry_after_s, reason, failed.each_s)
    return kind(failed.message)


class Channel(asyncio.Protocol, ABC):
    """One connection at a time. All methods run on the event loop.

    Args:
        peer: a name of the other process, for the log.
    """

    _MAX_UNSENT_BYTES = 2**28  # about 40 of the largest results that the defaults admit

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._transport: asyncio.Transport
        self._partial: bytearray  # of a message whose end has not arrived
        self._needed = _PREFIX.size  # bytes of that message

    @abstractmethod
    def received(self, message: memoryview) -> None:
        """Handle a message. An exception drops the peer."""

    @abstractmethod
    def lost(self) -> None:
        """Handle the end of the connection; called once."""

    def send(self, message: bytes) -> None:
        """Send a message without waiting. Drop the peer if too many bytes are unsent."""
        if self._transport.is_closing():
            return
        unsent = self._transport.get_write_buffer_size()
        if unsent > self._MAX_UNSENT_BYTES:
            self.drop(f"{unsent} bytes are unread, more than the limit of {self._MAX_UNSENT_BYTES}")
            return
        self._transport.writelines([_PREFIX.pack(len(message)), message])

    def drop(self, reason: str) -> None:
        """Close the connection at once and discard what is unsent."""
        log.error("the connection to %s is closed: %s", self.peer, reason)
        self._transport.abort()

    def close(self) -> None:
        """Close the connection after what is unsent."""
        self._transport.close()

    # ---- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._partial = bytearray()
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """See `asyncio.Protocol`."""
        if self._partial:
            log.warning("%s disconnected in the middle of a message", self.peer)
        self.lost()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        view = memoryview(data)
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return
            view, self._partial = memoryview(self._partial), bytearray()
        try:
            rest = self._receive_all(view)
        except Exception as error:  # the peer's next bytes cannot be trusted either
            self.drop(f"a malformed message ({type(error).__name__}: {error})")
            return
        self._partial += rest

    def _receive_all(self, data: memoryview) -> memoryview:
        """Handle every complete message; return the beginning of the next one."""
        while len(data) >= _PREFIX.size:
            (length,) = _PREFIX.unpack_from(data)
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"{length} bytes, more than the limit of {MAX_MESSAGE_BYTES}")
            self._needed = _PREFIX.size + length
            if len(data) < self._needed:
                return data
            self.received(data[_PREFIX.size : self._needed])
            data = data[self._needed :]
            if self._transport.is_closing():  # dropped while the message was handled
                return data[:0]
        self._needed = _PREFIX.size
        return data
