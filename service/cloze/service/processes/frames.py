"""The messages between front ends and engine processes, in MessagePack, over a Unix stream socket.

Both sides are processes of one release on one machine: messages carry no version, and the byte
order is the machine's. Requests and results of any head cross without code of their own: they are
dataclasses of numbers, lists and arrays.

A peer is one of our own processes. So a malformed message is a fault of a process: to decode it
raises one of `MALFORMED`, and the receiver closes the connection.

To an engine: `Run` and `Cancel`. To a front end: `Greeting`, which is the engine's first message,
and `Answer`. A `Channel` sends and receives messages. On the wire, the length of a message in
bytes, as an unsigned 32-bit integer, precedes it. The end of the stream is the death of the peer.
"""

import asyncio
import logging
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple, TypedDict, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from cloze.model_store.batch import Encoding
from cloze.model_store.heads import HEADS
from cloze.service import errors
from cloze.service.batching.fair_queue import NO_WAIT, ExpectedWait, Terms
from cloze.service.core import BatchResult
from cloze.service.errors import ServiceError

log = logging.getLogger("cloze")

MAX_MESSAGE_BYTES = 2**30
"""A longer message is malformed. The largest request that the defaults admit has 9 MB."""

_PREFIX = struct.Struct("=I")  # the length of a message

_REQUESTS = {name: msgspec.msgpack.Decoder(head.request) for name, head in HEADS.items()}
_by_head = {name: head.result for name, head in HEADS.items()}
_Results: Any = list[TypedDict("Results", _by_head, total=False)]  # type: ignore[misc,operator]
_DTYPES = {dtype.char: dtype for dtype in map(np.dtype, "?bhilqBHILQefd")}
_ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
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
    requests: list[dict[str, msgspec.Raw]]  # the distinct ones, with the index of each array
    request_of: list[_Index]  # index into `requests`, per encoding
    arrays: list[NDArray[Any]]  # the distinct ones of the requests
    input_ids: memoryview
    token_type_ids: memoryview


class _Run(msgspec.Struct, tag="run", array_like=True, gc=False):
    number: int
    model: _Index
    terms: Terms
    encodings: _Encodings


class _Answer(msgspec.Struct, tag="answer", array_like=True, gc=False):
    number: int
    outputs: _Results  # none: there is an error
    queue_s: float
    inference_s: float
    error: ServiceError | None
    wait: ExpectedWait


def _to_wire(value: Any) -> Any:
    """Return what stands for an array or an error in a message."""
    if isinstance(value, np.ndarray):
        return value.dtype.char, value.shape, value.tobytes()
    kind, message = type(value).__name__, str(value)
    if isinstance(value, errors.Overloaded):
        return kind, message, value.retry_after_s, value.reason, value.each_s
    return kind, message


def _from_wire(expected: type, parts: Any) -> Any:
    """Return the array or the error that `parts` stand for."""
    if expected is not ServiceError:
        dtype, shape, data = parts
        return np.ndarray(shape, _DTYPES[dtype], data)
    kind, message, *further = parts
    if further:
        further[1] = errors.Rejection(further[1])
    return _ERRORS[kind](message, *further)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_to_engine = msgspec.msgpack.Decoder(_Run | Cancel, dec_hook=_from_wire)
_to_front_end = msgspec.msgpack.Decoder(Greeting | _Answer, dec_hook=_from_wire)


def encode(message: Greeting | Cancel) -> bytes:
    """Return a message without arrays."""
    return _encoder.encode(message)


def encode_run(run: Run) -> bytes:
    """Return the message of a request."""
    return _encoder.encode(_Run(run.number, run.model, run.terms, _pack(run.encodings)))


def encode_answer(answer: Answer) -> bytes:
    """Return the message of an answer."""
    number, outcome, wait = answer
    if isinstance(outcome, ServiceError):
        return _encoder.encode(_Answer(number, [], 0.0, 0.0, outcome, wait))
    outputs, queue_s, inference_s = outcome
    return _encoder.encode(_Answer(number, outputs, queue_s, inference_s, None, wait))


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
    arrays: dict[int, tuple[int, NDArray[Any]]] = {}  # by identity, too
    requests: Any = msgspec.Raw(
        msgspec.msgpack.encode(
            [requests for _, requests in distinct.values()],
            enc_hook=lambda array: arrays.setdefault(id(array), (len(arrays), array))[0],
        )
    )
    return _Encodings(
        [len(encoding) for encoding in encodings],
        requests,
        request_of,
        [array for _, array in arrays.values()],
        np.concatenate([encoding.input_ids for encoding in encodings]).data,
        np.concatenate([encoding.token_type_ids for encoding in encodings]).data,
    )


def _unpack(packed: _Encodings) -> list[Encoding]:
    ids = np.frombuffer(packed.input_ids, np.int32)
    types = np.frombuffer(packed.token_type_ids, np.int32)
    ends = list(accumulate(packed.lengths, initial=0))
    if not len(ids) == len(types) == ends[-1]:
        raise ValueError(f"{ends[-1]} tokens have {len(ids)} ids and {len(types)} types")

    def decode(name: str, raw: msgspec.Raw) -> Any:
        if not packed.arrays:
            return _REQUESTS[name].decode(raw)
        kind = HEADS[name].request
        return msgspec.msgpack.decode(raw, type=kind, dec_hook=lambda _, i: packed.arrays[i])

    requests = [
        {name: decode(name, raw) for name, raw in by_head.items()} for by_head in packed.requests
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
    result = BatchResult(decoded.outputs, decoded.queue_s, decoded.inference_s)
    return Answer(decoded.number, decoded.error or result, decoded.wait)


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
