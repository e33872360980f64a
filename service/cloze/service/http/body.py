"""The bodies of requests and of answers, within limits of time and of memory.

A request ends early that takes too long, or whose client leaves.

A parser in C holds the interpreter until it returns, so all other threads, the event loop included,
wait meanwhile. So a scan in front of the parser counts what a large body would become, and refuses
too many values.
"""

import asyncio
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from anyio import CancelScope
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloze.service import errors
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import ServedRequest
from cloze.service.http.body_errors import describe, malformed, not_utf8
from cloze.service.http.bytes_held import SMALL_BYTES, ByteBudget, Hold
from cloze.service.http.gunzip import gunzip
from cloze.service.http.routes import RECORD, Connection
from cloze.service.threads import check_awaited, run_on_thread

SHORT_BYTES = 65_536
"""Most bytes of a body that is parsed on the event loop; it stays below all limits of values."""

_BODY = errors.Location()

B = TypeVar("B", bound=BaseModel)

_GONE = "the client closed its connection"


@dataclass(slots=True, eq=False)
class RequestLimits:
    """The limits of time and memory of the requests of one process, on one event loop.

    A request has two phases with the same longest time: its body is read, and then it is answered.

    Attributes:
        bodies: the bytes of the bodies of requests that have not ended.
        answers: the bytes of the answers that are written, or that clients have not read.
        clock: tells the time; timers follow the event loop.
        writers: the turns to decode and write a large answer; one client has two of three.
            Decoding needs the interpreter: more turns would need more memory and no less time.
    """

    bodies: ByteBudget
    answers: ByteBudget
    clock: Clock = CLOCK
    writers: ByteBudget = field(default_factory=lambda: ByteBudget("large answers", 3))

    @contextmanager
    def request(self, request: Request) -> Iterator[ServedRequest]:
        """Limit the time of a request of the current task, and raise why it ends early.

        Raises:
            InvalidRequest: the time limit or the class that the request states is malformed.
            SlowRequest: the body did not arrive in time.
            DeadlineExceeded: the request has a body, but no answer in time.
            ClientGone: the client closed its connection.
        """
        record: ServedRequest = request.scope[RECORD]
        connection: Connection | None = record.connection
        if record.terms_problem:
            raise errors.InvalidRequest(record.terms_problem)
        left_s = record.deadline - self.clock.monotonic()
        scope = CancelScope(deadline=asyncio.get_running_loop().time() + left_s)
        if connection is not None:
            if connection.is_lost:
                raise errors.ClientGone(_GONE)
            connection.on_lost = scope.cancel
        record.scope = scope
        try:
            with scope:
                yield record
        finally:
            record.scope = None
            if connection is not None:
                connection.on_lost = None
            if record.body is not None:
                self.bodies.release(record.body)
            if record.turn is not None:
                self.writers.release(record.turn)
        if scope.cancelled_caught:
            raise _why_ended(record)

    async def read(self, request: Request, limit: int) -> bytes:
        """Return the body of a request, decompressed.

        Raises:
            RequestTooLarge: the body, or what it is decompressed to, has more than ``limit`` bytes.
                If its announced length is larger, it is refused before it arrives.
            UnsupportedEncoding: the body is compressed, but not by gzip.
            MalformedRequest: the body cannot be decompressed.
            Overloaded: the bodies of other requests need the memory.
            ClientGone: the client closed its connection.
        """
        record: ServedRequest = request.scope[RECORD]
        if (record.length or 0) > limit:
            raise errors.RequestTooLarge(
                f"the body has {record.length} bytes; the limit is {limit}"
            )
        encoding = record.first.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"identity", b"gzip"):
            shown = ascii(encoding.decode("latin-1"))[:60]
            raise errors.UnsupportedEncoding(
                f"the body's Content-Encoding is {shown}; send gzip, or none"
            )
        began, received, more = self.clock.monotonic(), 0, True
        chunks: list[bytes] = []
        # Many clients read an error only after they have sent the whole of an oversized body.
        while more and received <= limit * 8:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise errors.ClientGone(
                    "the client closed its connection before its body was whole"
                )
            chunk, more = message.get("body", b""), message.get("more_body", False)
            received += len(chunk)
            record.received = received
            if received > limit:
                chunks.clear()
                if record.body is not None:
                    self.bodies.shrink(record.body, 0)
                continue
            if received > SMALL_BYTES:
                await self._hold(record, received)
            chunks.append(chunk)
        if received > limit:
            raise errors.RequestTooLarge(
                f"the body has at least {received} bytes; the limit is {limit}"
            )
        record.received = None
        # A body that arrives quickly leaves the request's time limit as it is.
        if (now := self.clock.monotonic()) - began > 0.05 and record.scope is not None:
            record.deadline = now + record.limit_s
            record.scope.deadline = asyncio.get_running_loop().time() + record.limit_s
        data = b"".join(chunks)
        if encoding == b"identity":
            record.body_bytes = len(data)
            return data
        # What the content may have at most is held until it is known.
        hold = await self._hold(record, len(data) + limit)
        content = await run_on_thread(gunzip, data, limit)
        record.body_bytes = len(content)
        self.bodies.shrink(hold, len(content) if len(content) > SMALL_BYTES else 0)
        return content

    async def _hold(self, record: ServedRequest, size: int) -> Hold:
        """Wait until the body of a request may hold so many bytes, within its time."""
        hold: Hold = record.body or Hold(record.client)
        record.body = hold
        await self.bodies.grow(hold, size, record.deadline - self.clock.monotonic())
        return hold

    async def begin_answer(self, record: ServedRequest) -> None:
        """Wait until a large answer may be decoded and written."""
        record.turn = Hold(record.client)
        await self.writers.grow(record.turn, 1, record.deadline - self.clock.monotonic())

    async def hold_answer(self, record: ServedRequest, size: int) -> None:
        """Wait until there is room for the bytes of an answer, and hold them until `sent`."""
        record.answer = Hold(record.client)
        await self.answers.grow(record.answer, size, record.deadline - self.clock.monotonic())

    def sent(self, record: ServedRequest) -> None:
        """Release the bytes of an answer, which its client has read, or never will."""
        self.answers.release(record.answer)
        record.answer = None


def _why_ended(record: ServedRequest) -> errors.ServiceError:
    limit = f"the limit of {record.limit_s * 1000:.0f} ms"
    if record.connection is not None and record.connection.is_lost:
        return errors.ClientGone(_GONE)
    if record.received is not None:
        return errors.SlowRequest(
            f"{record.received} bytes of the body arrived within {limit}, not all"
        )
    return errors.DeadlineExceeded(f"no answer within {limit}")


class BytesResponse(Response):
    """A response with a body of bytes.

    Starlette encodes each header of each response. Here the headers are bytes already, with names
    in lower case.
    """

    def __init__(
        self, body: bytes, media_type: bytes = b"application/json", *headers: tuple[bytes, bytes]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = body
        self.raw_headers = [
            (b"content-length", b"%d" % len(body)),
            (b"content-type", media_type),
            *headers,
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; a large body in parts, each when the client has read the others."""
        if len(self.body) <= SMALL_BYTES:
            await super().__call__(scope, receive, send)
            return
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        for first in range(0, len(self.body), SMALL_BYTES):
            part, end = self.body[first : first + SMALL_BYTES], first + SMALL_BYTES
            message = {"body": part, "more_body": end < len(self.body)}
            await send({"type": "http.response.body", **message})


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The limits of a body."""

    max_bytes: int  # most bytes, before and after decompression
    max_parts: int  # most texts, lists and objects in all, names of fields included
    max_values: int  # most JSON values in all, most of which are numbers then

    @classmethod
    def of_requests(cls, max_bytes: int, max_texts: int, max_tokens: int) -> "BodyLimits":
        """Return limits that admit every request within the limits of texts and tokens.

        A text may be one of several in an object, and each token may be a number.
        """
        max_parts = max(16 * max_texts, SHORT_BYTES // 2)
        return cls(max_bytes, max_parts, max_tokens + max_parts)


def validate(model: type[B], value: Any, at: errors.Location = _BODY) -> B:
    """Return a JSON value, which is at a location in the body, as a model.

    Raises:
        InvalidBody: the value does not have the shape of the model.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        raise errors.InvalidBody(describe(problems, value, at, model)) from None


def load(data: bytes, limits: BodyLimits, chunk_bytes: int = SHORT_BYTES) -> Any:
    """Return the value of a JSON body. A byte order mark of UTF-8 before it is ignored.

    Bodies above ``chunk_bytes``, at least 2, have the limits; so much is scanned at once.

    Raises:
        MalformedRequest: the body is not JSON.
        RequestTooLarge: the body has too many values.
    """
    if data.startswith(BOM_UTF8):
        data = b"   " + data[3:]  # spaces, so that offsets in errors are those of the body
    if b"\0" in data[:4] or data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise not_utf8("it begins as UTF-16 or UTF-32, at byte 0")
    if not data.strip():
        raise errors.MalformedRequest("the body is empty; send a JSON object")
    if len(data) > chunk_bytes:
        _check_counts(data, limits, chunk_bytes)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise malformed(error, data) from None


def _check_counts(data: bytes, limits: BodyLimits, chunk_bytes: int) -> None:
    """Raise `RequestTooLarge` if a body has too many values; it need not be JSON."""
    scanned = quotes = brackets = commas = 0
    while scanned < len(data):
        check_awaited()
        chunk = _without_strings(data[scanned : scanned + chunk_bytes], in_string=quotes % 2 == 1)
        scanned += len(chunk)
        quotes += chunk.count(b'"')
        brackets += chunk.count(b"[") + chunk.count(b"{")
        commas += chunk.count(b",")
        if brackets + quotes // 2 > limits.max_parts:
            raise errors.RequestTooLarge(
                f"the body has over {limits.max_parts} texts, lists and objects, the limit"
            )
        if commas + brackets > limits.max_values:
            raise errors.RequestTooLarge(f"the body has over {limits.max_values} values, the limit")


def _without_strings(chunk: bytes, *, in_string: bool) -> bytes:
    """Return JSON, which may begin in a string, with ``_`` for each byte inside a string.

    The result lacks the last byte if that is a backslash, whose character is in the next chunk.
    """
    chunk = chunk.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    if chunk.endswith(b"\\") and len(chunk) > 1:
        chunk = chunk[:-1]
    parts = chunk.split(b'"')
    for index in range(not in_string, len(parts), 2):
        parts[index] = b"_" * len(parts[index])
    return b'"'.join(parts)
