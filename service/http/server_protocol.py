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
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import orjson
from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cloze.service.http.answers import CONNECTION, Answers
from cloze.service.http.gate import ARRIVED, CLIENT, note_start
from cloze.service.http.one_write import OneWrite
from cloze.service.http.paths import sent_path
from cloze.service.http.starts import Starts

log = logging.getLogger("cloze")

MAX_HEADER_BYTES = 65_536
"""Most bytes of the headers of a request."""

_SLICE_BYTES = 8_192
"""Most received bytes that are parsed per turn of the event loop.

uvloop passes up to 256,000 bytes at once: 40,000 chunks of a body, or 14,000 requests.
"""

_UNASKED = "cloze.unasked"
"""Key of a scope: whether the gate is to be asked when the turn of the request comes."""

_NO_REQUEST = "it sent no request in time"
_SLOW_HEADERS = "the headers of its request did not arrive in time"
_SLOW_BODY = "the body of its refused request did not arrive in time"

_DRAIN_BODY_S = 5.0
"""Longest time in which the rest of a body arrives after SIGTERM."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of connections.

    Attributes:
        header_timeout_s: longest time from the first byte of a request to the end of its headers.
        idle_timeout_s: longest time without a request.
        max_connections: most open connections.
        max_per_address: most open connections of one address; 0: no such limit.
    """

    header_timeout_s: float
    idle_timeout_s: float
    max_connections: int
    max_per_address: int = 0


class ConnectionTable:
    """The open connections of a process.

    Args:
        limits: the limits of connections.

    Attributes:
        limits: the limits of connections.
        is_draining: whether a connection that opens now ends at once. Its client began to connect
            before the drain, for example by a TLS handshake.
        closed_count: number of connections that have closed; the owner may reset it.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.is_draining = False
        self.closed_count = 0
        self._open = 0
        self._by_address: Counter[str] = Counter()
        self._idle: dict[ServerProtocol, None] = {}  # the one that is idle for longest is first

    def opened(self, connection: "ServerProtocol") -> str | None:
        """Count a new connection, and close the oldest idle one if there are too many.

        Returns:
            Why the connection is refused; None if it is not.
        """
        self._open += 1
        address = connection.address
        self._by_address[address] += 1
        self._idle[connection] = None
        most = self.limits.max_per_address
        if most and self._by_address[address] > most:
            return f"the address has {self._by_address[address]} connections, and {most} at most"
        if self._open > self.limits.max_connections:
            oldest = next(iter(self._idle))
            if oldest is connection:
                return f"the server has {self.limits.max_connections} connections, the most"
            del self._idle[oldest]  # several connections may open before this one has closed
            oldest.end("it made room for a new one")
        return None

    def closed(self, connection: "ServerProtocol") -> None:
        """Forget a connection."""
        self._open -= 1
        self.closed_count += 1
        self._idle.pop(connection, None)
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]

    def busy(self, connection: "ServerProtocol") -> None:
        """Note that the headers of a request have arrived."""
        self._idle.pop(connection, None)

    def idle(self, connection: "ServerProtocol") -> None:
        """Note that a connection has no request."""
        self._idle[connection] = None


class _Flow(FlowControl):
    """Flow control that resumes only when the requests of a pipeline have been started.

    Args:
        connection: the connection.
    """

    def __init__(self, connection: "ServerProtocol") -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        """Parse what was received meanwhile, and then read on."""
        if self.read_paused and not self._connection.pipeline:
            self.read_paused = False
            self._connection.parse_soon()


class ServerProtocol(HttpToolsProtocol):
    """One connection; see the module.

    Args:
        refusal: returns the response that refuses a request, or None; see `Gate.refusal`.
        table: the open connections of this process.
        answers: the unread answers of this process.
        starts: the requests of this process that have not started.
        arguments: those of uvicorn's protocol.
    """

    def __init__(
        self,
        *,
        refusal: Callable[[Scope], bytes | None],
        table: ConnectionTable,
        answers: Answers,
        starts: Starts,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._refusal = refusal
        self._table = table
        self._answers, self._starts = answers, starts
        self._unparsed = b""
        self._header_bytes = 0
        self._progress = False
        self._refused = False  # whether the body of a refused request is still arriving
        self._closes = False  # whether the connection ends after that body
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = math.inf  # `loop.time` at which the connection ends, for this reason:
        self._reason = ""
        self.address = ""

    # ---- the connection -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, or refuse it; see `asyncio.Protocol`."""
        super().connection_made(transport)
        self.flow = _Flow(self)
        self.address = self.client[0] if self.client else ""
        if (reason := self._table.opened(self)) is not None:
            log.warning("a connection was refused: %s", reason)
            self._answer_and_close(503, "Service Unavailable", reason, "retry-after: 1\r\n")
            return
        if self._table.is_draining:
            self.shutdown()
            return
        self._expect(self._table.limits.idle_timeout_s, _NO_REQUEST)
        self._check_time()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; see `asyncio.Protocol`."""
        self._stop_timer()
        self._table.closed(self)
        self._answers.was_read(self)
        if self.scope is not None:
            cast(Scope, self.scope).pop(CONNECTION, None)  # else a cycle
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

    def _expect(self, seconds: float, reason: str) -> None:
        """Set the time at which the connection ends, unless another time is set before."""
        self._deadline, self._reason = self.loop.time() + seconds, reason

    def _check_time(self) -> None:
        """End the connection if its time is over, else look again.

        A timer per wait would cost more than the other work of a refusal. This one runs at least
        as often as the shortest wait, so that no end is late.
        """
        left_s = self._deadline - self.loop.time()
        if left_s <= 0 and self._answers.is_reading(self):
            left_s = self._table.limits.idle_timeout_s  # it is not idle
            self._expect(left_s, self._reason)
        elif left_s <= 0:
            self.end(self._reason)
            return
        seconds = min(left_s, self._table.limits.header_timeout_s, _DRAIN_BODY_S)
        self._timer = self.loop.call_later(seconds, self._check_time)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def shutdown(self) -> None:
        """End the connection after its request. The drain waits for a body, but not for long."""
        super().shutdown()
        if not self.transport.is_closing() and self.cycle.more_body:
            self._expect(_DRAIN_BODY_S, "its body did not arrive during the drain")

    # ---- received bytes -------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, or let them wait behind others."""
        is_waiting = bool(self._unparsed)
        self._unparsed += data
        if not is_waiting:
            self._parse()

    def parse_soon(self) -> None:
        """Parse the bytes that wait, and read on."""
        if self._unparsed:
            self.loop.call_soon(self._parse)
        else:
            self.transport.resume_reading()

    def _parse(self) -> None:
        """Parse a slice of the received bytes, unless reading is paused."""
        if self.flow.read_paused or self.transport.is_closing():
            return
        data, self._unparsed = self._unparsed[:_SLICE_BYTES], self._unparsed[_SLICE_BYTES:]
        self._parse_slice(data)
        if self._unparsed:
            self.transport.pause_reading()
        if not self.flow.read_paused:
            self.parse_soon()

    def _parse_slice(self, data: bytes) -> None:
        """Parse bytes, and count them if they cause no parser event."""
        self._progress = False
        super().data_received(data)
        if self._progress:
            self._header_bytes = 0
            return
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            message = f"the request's headers have more than {MAX_HEADER_BYTES} bytes, the limit"
            log.warning("a request was refused: %s", message)
            self._answer_and_close(431, "Request Header Fields Too Large", message)

    def on_message_begin(self) -> None:
        """Note the first byte of a request, whose headers must arrive in time."""
        self._progress = True
        self._expect(self._table.limits.header_timeout_s, _SLOW_HEADERS)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Refuse the request if the server is full, else start it."""
        self._progress = True
        self._deadline = math.inf
        self._table.busy(self)
        cast(Scope, self.scope)[CONNECTION] = self
        if self.parser.get_method() == b"POST":
            scope = cast(Scope, self.scope)
            in_turn = self.cycle is None or self.cycle.response_complete
            scope["path"], scope[_UNASKED] = sent_path(self.url), not in_turn
            if in_turn and (answer := self._refusal(scope)) is not None:
                self._refuse(answer)
                return
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Start a request, or let it wait behind others; see `Starts`."""
        scope = cast(Scope, cycle.scope)
        scope["path"] = scope["raw_path"].decode("ascii")  # uvicorn's is decoded; see `paths`
        if scope.pop(_UNASKED, False) and (answer := self._refusal(scope)) is not None:
            self._refuse_cycle(cycle, answer)
            return
        if scope["method"] != "HEAD":  # whose answer is a head alone
            cycle.transport = cast(asyncio.Transport, OneWrite(self.transport))
        client = scope.get(CLIENT)
        if client is None:  # not a request of the gate's
            super()._start_asgi_task(cycle, app)
        elif not self._starts.start(client, partial(self._begin, cycle, app)):
            scope[ARRIVED] = time.monotonic()

    def _begin(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if cycle.disconnected:
            note_start(cast(Scope, cycle.scope))
        else:
            super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, or discard it if the request was refused."""
        self._progress = True
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of the request."""
        self._progress = True
        if not self._refused:
            super().on_message_complete()
            if self.cycle is not None and not self.cycle.response_complete:
                self._deadline = math.inf  # a drain limits the time of the body only
            return
        self._refused = False
        if self._closes:
            self.transport.close()
        else:
            self._wait_for_request()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # one timer serves all waits of the connection
        if self.cycle.response_complete and not self.transport.is_closing():
            self._wait_for_request()  # else the next request of a pipeline has begun

    def _wait_for_request(self) -> None:
        self._table.idle(self)
        self._expect(self._table.limits.idle_timeout_s, _NO_REQUEST)

    # ---- refusals -------------------------------------------------------------------------------

    def _refuse(self, answer: bytes) -> None:
        """Refuse the current request, whose body may still arrive."""
        self._refused = True
        if self.flow.write_paused:
            self.end("it does not read the answers")
            return
        keeps = self.parser.should_keep_alive() and self.parser.get_http_version() == "1.1"
        # A client that waits for "100 Continue" may send its body or not.
        self._closes = self.expect_100_continue or not keeps
        if self._closes:
            answer = answer.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
        self.transport.write(answer)
        if self.expect_100_continue:
            self.transport.close()
            return
        # A close before the body has arrived would discard the answer.
        self._expect(self._table.limits.header_timeout_s, _SLOW_BODY)

    def _refuse_cycle(self, cycle: RequestResponseCycle, answer: bytes) -> None:
        """Refuse a request of a pipeline, whose turn has come."""
        if self.flow.write_paused:
            self.end("it does not read the answers")
            return
        self.transport.write(answer)
        cycle.response_started = cycle.response_complete = True  # uvicorn discards its body
        if not cycle.keep_alive:
            self.transport.close()
        self.loop.call_soon(self.on_response_complete)  # hundreds may follow, so not a recursion

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
