"""uvicorn's HTTP protocol with limits: on headers, on time, and on connections.

uvicorn limits neither the size of headers nor the time in which they arrive, and ends no connection
that has sent nothing. The class also asks the gate, as soon as the headers of a request have
arrived, whether a full server refuses the request.
"""

import asyncio
import fcntl
import logging
import math
import termios
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
import orjson
from starlette.types import Scope

from cloze.service.http.gate import Refusal, Starts
from cloze.service.http.memory_limit import Reader, UnreadAnswers
from cloze.service.http.record import RECORD, RequestRecord
from cloze.service.http.returns import Returns
from cloze.service.server.acceptor import ConnectionTable
from cloze.service.server.uvicorn_internals import (
    ASGI3Application,
    FlowControl,
    HttpToolsProtocol,
    RequestResponseCycle,
)

log = logging.getLogger("cloze")

MAX_HEADER_BYTES = 65_536
"""Most bytes of the headers of a request."""

_SLICE_BYTES = 8_192
"""Most received bytes that are parsed per turn of the event loop.

uvloop passes up to 256,000 bytes at once: 40,000 chunks of a body, or 14,000 requests.
"""

_DRAIN_BODY_S = 5.0
"""Longest time in which the rest of a body arrives after SIGTERM."""

_LARGE: Final = 65_536
"""A body of more bytes is not copied behind its head."""


class State(Enum):
    """What a connection waits for. The value says why it ends if that takes too long.

    The time of a running request has its limits elsewhere; see `watch`.
    """

    IDLE = "it sent no request in time"
    HEADERS = "the headers of its request did not arrive in time"
    RUNNING = ""
    DRAINING = "its body did not arrive during the drain"
    DISCARDING = "the body of its refused request did not arrive in time"


@dataclass(slots=True, eq=False)
class OneWrite:
    """The transport of one request; it holds the head of its answer until the body follows.

    uvicorn writes them one after the other: two system calls and two packets for each small answer.
    A process that was killed between them left half an answer, which a balancer cannot send again
    to another replica. Not for HEAD: no body follows.
    """

    transport: asyncio.Transport
    head: bytes | None = None  # None: not written yet; empty: written

    def write(self, data: bytes) -> None:
        """Hold the head, or write a part of the body; see `asyncio.WriteTransport`."""
        if self.head is None and not data.startswith(b"HTTP/1.1 100 "):
            self.head = data
            return
        if self.head:
            if len(data) <= _LARGE:
                data = self.head + data
            else:
                self.transport.write(self.head)
            self.head = b""
        self.transport.write(data)

    def is_closing(self) -> bool:
        """Whether the connection is closed; see `asyncio.BaseTransport`."""
        return self.transport.is_closing()

    def close(self) -> None:
        """Write a held head and close the connection; see `asyncio.BaseTransport`."""
        if self.head:
            self.transport.write(self.head)
            self.head = b""
        self.transport.close()


class _Flow(FlowControl):
    """Flow control that resumes only when the requests of a pipeline have been started."""

    def __init__(self, connection: "ServerProtocol") -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        """Parse what was received meanwhile, and then read on."""
        if self.read_paused and not self._connection.pipeline:
            self.read_paused = False
            self._connection.loop.call_soon(self._connection.parse)


class ServerProtocol(HttpToolsProtocol):
    """One connection; see the module.

    Args:
        admit: makes the record of a request whose turn has come, by its scope and connection;
            returns the refusal of the request, or None.
        arguments: those of uvicorn's protocol.
    """

    def __init__(
        self,
        *,
        admit: Callable[[Scope, Reader], Refusal | None],
        table: ConnectionTable,
        answers: UnreadAnswers,
        starts: Starts,
        returns: Returns,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._admit, self._table = admit, table
        self._answers, self._starts, self._returns = answers, starts, returns
        self._record: RequestRecord | None = None  # of the last request whose turn has come
        self._held: Refusal | None = None  # of that request, if it is answered later
        self._unparsed = b""
        self._header_bytes = 0
        self._progress = False  # whether received bytes have caused a parser event
        self._state = State.IDLE
        self._since = 0.0  # `loop.time` at which the state began
        self._timer: asyncio.TimerHandle | None = None
        self.address = ""

    # ---- the connection -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, or refuse it; see `asyncio.Protocol`."""
        super().connection_made(transport)
        self.flow = _Flow(self)
        self.address = self.client[0] if self.client else ""
        if (reason := self._table.opened(self)) is not None:
            self._answer_and_close(503, "Service Unavailable", reason, "retry-after: 1\r\n")
            return
        if self._table.is_draining:
            self.shutdown()
            return
        self._enter(State.IDLE)
        self._check_time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; see `asyncio.Protocol`."""
        self._stop_timer()
        self._table.closed(self)
        self._answers.was_read(self)
        self._returns.closed(self, time.monotonic())
        if self._record is not None:
            self._record.connection = None  # else a cycle
        super().connection_lost(exc)

    def end(self, reason: str) -> None:
        """Close the connection."""
        log.debug("a connection was closed: %s", reason)
        self._stop_timer()
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the client does not read, so a close would wait for ever
        elif not self.transport.is_closing():
            self.transport.close()

    def unread_bytes(self) -> int:
        """Return the bytes of answers that wait for the client; 0 below the low-water mark."""
        return self.transport.get_write_buffer_size() if self.flow.write_paused else 0

    def unsent_bytes(self) -> int:
        """Return the bytes of answers that the client's machine has not acknowledged.

        The kernel takes megabytes at once from this process, even for a client that reads steadily.
        """
        kernel = array("i", [0])
        with suppress(OSError, ValueError):  # the socket is closed, or the system lacks this
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kernel)
        return self.transport.get_write_buffer_size() + kernel[0]

    def resume_writing(self) -> None:
        """Note that the client has read its answers; see `asyncio.Protocol`."""
        super().resume_writing()
        self._answers.was_read(self)

    def _enter(self, state: State) -> None:
        """Enter a state, from which its time begins."""
        self._state, self._since = state, self.loop.time()
        if state is State.IDLE:
            self._table.idle[self] = None
        elif state is not State.HEADERS:
            self._table.idle.pop(self, None)

    def _check_time(self) -> None:
        """End the connection if its state has lasted for too long, else look again.

        A timer per wait would cost more than the other work of a refusal. This one runs at least
        as often as the shortest wait, so that no end is late.
        """
        limits, now = self._table.limits, self.loop.time()
        longest_s = {
            State.IDLE: limits.idle_timeout_s,
            State.RUNNING: math.inf,
            State.DRAINING: _DRAIN_BODY_S,
        }.get(self._state, limits.header_timeout_s)
        if self._since + longest_s <= now:
            if not self._answers.is_reading(self):
                self.end(self._state.value)
                return
            self._since = now  # it is not idle
        seconds = min(self._since + longest_s - now, limits.header_timeout_s, _DRAIN_BODY_S)
        self._timer = self.loop.call_later(seconds, self._check_time)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def shutdown(self) -> None:
        """End the connection after its request. The drain waits for a body, but not for long."""
        super().shutdown()
        if not self.transport.is_closing() and self.cycle.more_body:
            self._enter(State.DRAINING)

    # ---- received bytes -------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, or let them wait behind others."""
        is_waiting = bool(self._unparsed)
        self._unparsed += data
        if not is_waiting:
            self.parse()

    def parse(self) -> None:
        """Parse a slice of the received bytes, unless reading is paused."""
        if self.flow.read_paused or self.transport.is_closing():
            return
        data, self._unparsed = self._unparsed[:_SLICE_BYTES], self._unparsed[_SLICE_BYTES:]
        self._progress = False
        self._feed(data)
        self._header_bytes = 0 if self._progress else self._header_bytes + len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            message = f"the request's headers have more than {MAX_HEADER_BYTES} bytes, the limit"
            self._refuse_unread(431, message)
        if self._unparsed:
            self.transport.pause_reading()
            if not self.flow.read_paused:
                self.loop.call_soon(self.parse)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _feed(self, data: bytes) -> None:
        """Parse bytes. A client's offer to change the protocol is ignored (RFC 9110, section 7.8).

        A parser ends after the head of a request with such an offer: its body would be in the
        other protocol. So a new parser gets that head again, without the offer.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    message = "the server is no proxy: it does not answer CONNECT"
                    self._refuse_unread(405, message, "allow: GET, HEAD, POST\r\n")
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            except httptools.HttpParserError as error:
                if self.parser.get_method() == b"PRI":  # the first bytes of HTTP/2
                    self._refuse_unread(505, "the server speaks HTTP/1.1 only, not HTTP/2")
                    return
                is_url = isinstance(error.__context__, httptools.HttpParserInvalidURLError)
                problem = "its target is not a URL" if is_url else error  # not the client's text
                self._refuse_unread(400, f"the request is not HTTP/1.1: {problem}")
                return

    def _head_without_upgrade(self) -> bytes:
        """Return the head of the current request without its headers ``Upgrade``."""
        version = self.parser.get_http_version().encode()
        first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)
        fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join((first, *fields, b"", b""))

    def on_message_begin(self) -> None:
        """Note the first byte of a request, whose headers must arrive in time."""
        self._progress = True
        self._enter(State.HEADERS)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Refuse the request if its turn has come and the server is full, else go on."""
        self._progress = True
        if self.parser.should_upgrade():  # its head comes again; see `_feed`
            return
        is_next = self.cycle is None or self.cycle.response_complete
        if is_next and self.parser.get_method() == b"POST":
            scope, path = cast(Scope, self.scope), httptools.parse_url(self.url).path
            scope["method"], scope["path"] = "POST", path.decode("ascii")
            if (refusal := self._ask(scope)) is not None and not refusal.hold_s:
                self._refuse(refusal.answer)
                return
        self._enter(State.RUNNING)
        super().on_headers_complete()

    def _ask(self, scope: Scope) -> Refusal | None:
        """Ask the gate for a request whose turn has come."""
        refusal = self._admit(scope, self)
        self._record = scope[RECORD]
        self._held = refusal
        return refusal

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Start a request, or let it wait behind others; see `Starts`."""
        scope = cast(Scope, cycle.scope)
        scope["path"] = scope["raw_path"].decode("ascii")  # uvicorn's is decoded; see `Paths`
        if self._table.ends_after_answer:
            cycle.keep_alive = False  # uvicorn says so in the answer
        refusal, self._held = self._held if RECORD in scope else self._ask(scope), None
        if refusal is not None:
            super()._start_asgi_task(cycle, partial(self._refuse_later, cycle, refusal))
            return
        record: RequestRecord = scope[RECORD]
        if record.method != "HEAD":  # whose answer is a head alone
            cycle.transport = cast(asyncio.Transport, OneWrite(self.transport))
        if record.unstarted is None:  # not a request of the gate's
            super()._start_asgi_task(cycle, app)
        else:
            self._starts.start(record, partial(super()._start_asgi_task, cycle, app))

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, or discard it if the request was refused."""
        self._progress = True
        if self._state is not State.DISCARDING:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of the request."""
        self._progress = True
        if self.parser.should_upgrade():
            return
        if self._state is not State.DISCARDING:
            super().on_message_complete()
            if self._state is State.DRAINING:
                self._enter(State.RUNNING)
        elif self._keeps_alive:
            self._enter(State.IDLE)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # one timer serves all waits of the connection
        if self.transport.is_closing() or not self.cycle.response_complete:
            return  # the next request of a pipeline has begun
        if self._state is State.RUNNING:
            self._enter(State.IDLE)
        elif self._state is State.HEADERS:
            self._table.idle[self] = None

    # ---- refusals -------------------------------------------------------------------------------

    @property
    def _keeps_alive(self) -> bool:
        """Whether the connection stays open after a refusal of the current request.

        A client that waits for "100 Continue" may send its body or not.
        """
        keeps = self.parser.should_keep_alive() and self.parser.get_http_version() == "1.1"
        ends = self.expect_100_continue or self._table.ends_after_answer
        return bool(keeps and not ends)

    def _refuse(self, answer: bytes) -> None:
        """Refuse the current request, whose body may still arrive."""
        self._enter(State.DISCARDING)  # a close before the body has arrived discards the answer
        if self.flow.write_paused:
            self.end("it does not read the answers")
            return
        self.transport.write(answer if self._keeps_alive else _with_close(answer))
        if self.expect_100_continue:
            self.transport.close()

    async def _refuse_later(
        self, cycle: RequestResponseCycle, refusal: Refusal, *_: object
    ) -> None:
        """Refuse a request of a pipeline, or one whose refusal is held, as an application."""
        await asyncio.sleep(refusal.hold_s)
        if self.transport.is_closing():
            return
        if self.flow.write_paused:
            self.end("it does not read the answers")
            return
        keeps_alive = cycle.keep_alive and not cycle.waiting_for_100_continue
        self.transport.write(refusal.answer if keeps_alive else _with_close(refusal.answer))
        cycle.response_started = cycle.response_complete = True  # uvicorn discards its body
        cycle.body = bytearray()
        if not keeps_alive:
            self.transport.close()
        self.on_response_complete()

    def _refuse_unread(self, status: int, message: str, headers: str = "") -> None:
        """Refuse bytes that are no request, or none of this server's, and close the connection."""
        log.warning("a request was refused: %s", message)
        self._answer_and_close(status, HTTPStatus(status).phrase, message, headers)

    def _answer_and_close(self, status: int, phrase: str, message: str, headers: str = "") -> None:
        body = orjson.dumps({"error": message, "error_type": "Validation"})
        head = (
            f"HTTP/1.1 {status} {phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            f"{headers}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _with_close(answer: bytes) -> bytes:
    """Return an answer that says that its connection ends."""
    return answer.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
