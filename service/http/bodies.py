"""Reads and parses request bodies."""

import asyncio
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from cloze.service.abandonment import run_on_thread
from cloze.service.core import (
    ClientGone,
    InvalidRequest,
    Location,
    MalformedRequest,
    RequestTooLarge,
    UnsupportedEncoding,
)
from cloze.service.http.json_bodies import PIECE_BYTES, BodyLimits, load
from cloze.service.http.watch import WatchedRequest

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

_DISCARD_FACTOR = 8
"""Multiple of the size limit up to which an oversized body of unknown length is discarded.

Many clients read the error response only after they have sent the whole body.
"""

MAX_MEMBERS: Final = 1000
"""Most members of a body. Compressors write one; those that work in blocks one per 64 KiB."""

_GZIP: Final = 31
"""zlib's ``wbits`` for the gzip format with the largest window."""

_INPUT_BYTES: Final = 16_384
"""Most bytes that are passed to zlib at once; it copies those that it does not take."""

_CONTENT_BYTES: Final = 262_144
"""A piece ends when it has this size, or when this much of the data was read."""

_LONGEST_NAME = 80
"""Most characters of a field's name in errors."""

_BODY = Location()

_JSON_MESSAGES = {
    "dict_type": "Input should be an object",
    "list_type": "Input should be a valid array",
    "model_type": "Input should be an object",
    "tuple_type": "Input should be a valid array",
}
"""Errors in the terms of JSON, where pydantic's message has those of Python."""


async def receive(
    request: Request, model: type[B], limits: BodyLimits, watched: WatchedRequest
) -> tuple[B, int]:
    """Read and parse the body of a request.

    Args:
        request: the request.
        model: the type of the body.
        limits: the limits of the body.
        watched: ends the request if the body does not arrive in time.

    Returns:
        The parsed body and its size in bytes.

    Raises:
        RequestError: see `read_body` and `parse`.
    """
    data = await read_body(request, limits.max_bytes, watched)
    return await run_anywhere(len(data), parse, model, data, limits), len(data)


async def run_anywhere(size: int, function: Callable[..., T], *arguments: object) -> T:
    """Return the result of a function; it runs on a thread if the body has many bytes.

    Args:
        size: bytes of the body.
        function: the function.
        arguments: the arguments of the function.
    """
    if size <= PIECE_BYTES:
        return function(*arguments)
    return await run_on_thread(function, *arguments)


def parse(model: type[B], data: bytes, limits: BodyLimits) -> B:
    """Parse a JSON body.

    Raises:
        MalformedRequest: the body is not JSON.
        RequestTooLarge: the body has too many values.
        InvalidRequest: the JSON does not have the shape of the model.
    """
    return validate(model, load(data, limits))


def validate(model: type[B], value: Any, at: Location = _BODY) -> B:
    """Return a JSON value as a model.

    Args:
        model: the type of the value.
        value: the value.
        at: the place of the value in the body.

    Raises:
        InvalidRequest: the value does not have the shape of the model.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise InvalidRequest(_describe(problems, value, at)) from None


def _describe(problems: Sequence[Any], value: Any, at: Location) -> str:
    """Return the message for validation errors, without the values that the client sent.

    If a field accepts several types, the message lists up to four errors of the first field.
    """
    first = problems[0]["loc"][:1]
    lines = dict.fromkeys(
        f"{_shown(at.below(*_place(problem, value)))}: "
        f"{_JSON_MESSAGES.get(problem['type'], problem['msg'])}"
        for problem in problems
        if problem["loc"][:1] == first
    )
    return "; ".join(list(lines)[:4])


def _place(problem: Any, value: Any) -> list[str | int]:
    """Return the place of a validation error in a value.

    pydantic's places also name the members of unions, which the value does not have.
    """
    place: list[str | int] = []
    for part in problem["loc"]:
        fields = range(len(value)) if isinstance(value, list) else value
        if isinstance(fields, dict | range) and part in fields:
            value = value[part]
            place.append(part)
    return [*place, problem["loc"][-1]] if problem["type"] == "missing" else place


def _shown(at: Location) -> str:
    return ".".join(str(part)[:_LONGEST_NAME] for part in at) or "the body"


async def read_body(request: Request, limit: int, watched: WatchedRequest) -> bytes:
    """Return the body of a request, decompressed.

    Args:
        request: the request.
        limit: most bytes of the body, before and after decompression.
        watched: ends the request if the body does not arrive in time.

    Raises:
        RequestTooLarge: the body has more than ``limit`` bytes, or its length is announced so. Such
            a request is refused before its body arrives.
        UnsupportedEncoding: the body is compressed, but not by gzip.
        MalformedRequest: the body cannot be decompressed.
        Overloaded: the bodies of other requests need the memory.
        SlowRequest: the body arrives too slowly.
        ClientGone: the client closed its connection.
    """
    encoding, length = _check_headers(request, limit)
    data = await _receive_body(request, limit, length, watched)
    return await _decompress(data, limit, watched) if encoding == b"gzip" else data


def _check_headers(request: Request, limit: int) -> tuple[bytes, int | None]:
    """Return the content encoding of a request, ``identity`` or ``gzip``, and its length if known.

    Raises:
        RequestTooLarge: the announced length is above the limit.
        UnsupportedEncoding: the encoding is another one.
    """
    encoding, length = b"identity", None
    for name, value in request.scope["headers"]:
        if name == b"content-length" and (length := int(value)) > limit:
            raise RequestTooLarge(f"the body has {length} bytes; the limit is {limit}")
        if name == b"content-encoding":
            encoding = value.strip().lower()
    if encoding not in (b"identity", b"gzip"):
        shown = ascii(encoding.decode("latin-1"))[:60]
        raise UnsupportedEncoding(f"the body's Content-Encoding is {shown}; send gzip, or none")
    return encoding, length


async def _decompress(data: bytes, limit: int, watched: WatchedRequest) -> bytes:
    """Return the content of gzip data.

    A thread decompresses a piece at a time, so that the end of the request ends the work. Memory is
    held for the data and for the content, and from the end on for the content alone.

    Raises:
        RequestTooLarge: the content has more than ``limit`` bytes, or too many members.
        MalformedRequest: the data is not gzip, or is cut.
        Overloaded: the bodies of other requests need the memory.
    """
    gunzip = Gunzip(data)
    pieces, size = [], 0
    while not gunzip.is_done:
        pieces.append(await asyncio.to_thread(gunzip.piece))
        size += len(pieces[-1])
        if size > limit:
            raise RequestTooLarge(f"the decompressed body has over {limit} bytes, the limit")
        await watched.hold_body(len(data) + size)
    watched.release_body(size)
    return b"".join(pieces)


async def _receive_body(
    request: Request, limit: int, length: int | None, watched: WatchedRequest
) -> bytes:
    """Return the bytes of a body.

    Args:
        request: the request.
        limit: most bytes of the body.
        length: the announced length; None: there is none.
        watched: holds memory for the body.
    """
    chunks: list[bytes] = []
    more = True
    while more and watched.received_bytes <= limit * _DISCARD_FACTOR:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client closed its connection before its body was whole")
        chunk, more = message.get("body", b""), message.get("more_body", False)
        if watched.received_bytes + len(chunk) > limit:
            chunks.clear()
            watched.received_bytes += len(chunk)
            watched.release_body(0)
            continue
        await watched.received(len(chunk), length or 0)
        chunks.append(chunk)
    if watched.received_bytes > limit:
        sent = watched.received_bytes
        raise RequestTooLarge(f"the body has at least {sent} bytes; the limit is {limit}")
    watched.body_complete()
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class Gunzip:
    """The content of gzip data, which may have several members, in a time linear in the data.

    Args:
        data: the data.
    """

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0  # of the next byte that zlib has not taken
        self._member = zlib.decompressobj(wbits=_GZIP)
        self._members = 1

    @property
    def is_done(self) -> bool:
        """Whether all content has been returned."""
        return self._at == len(self._data) and (not self._at or self._member.eof)

    def piece(self) -> bytes:
        """Return the next bytes of the content, about `_CONTENT_BYTES` at most.

        Raises:
            RequestTooLarge: the data has more than `MAX_MEMBERS` members.
            MalformedRequest: the data is not gzip, or is cut.
        """
        content = bytearray()
        read_until = self._at + _CONTENT_BYTES
        while not self.is_done and self._at < read_until and len(content) < _CONTENT_BYTES:
            if self._member.eof:
                self._next_member()
            taken = self._data[self._at : self._at + _INPUT_BYTES]
            if not taken:
                raise MalformedRequest("the body is not gzip: it ends too early")
            try:
                content += self._member.decompress(taken, _CONTENT_BYTES)
            except zlib.error as error:
                raise MalformedRequest(f"the body is not gzip: {error}") from None
            member = self._member
            self._at += len(taken)
            self._at -= len(member.unused_data if member.eof else member.unconsumed_tail)
        return bytes(content)

    def _next_member(self) -> None:
        if self._members == MAX_MEMBERS:
            raise RequestTooLarge(f"the gzip body has over {MAX_MEMBERS} members, the limit")
        self._members += 1
        self._member = zlib.decompressobj(wbits=_GZIP)
