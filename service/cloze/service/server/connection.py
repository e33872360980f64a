"""uvicorn's HTTP protocol with limits: on headers, on time, and on connections.

uvicorn limits neither the size of headers nor the time in which they arrive, and never
closes a connection that has not sent a byte.

No other module imports uvicorn's inner modules.
"""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import httptools
import orjson
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cloze.service.errors import CODES_OF_STATUSES
from cloze.service.http.routes import CONNECTION, Connection
from cloze.service.server.acceptor import ConnectionTable

log = logging.getLogger("cloze")

MAX_HEADER_BYTES = 65_536
"""Most bytes of the headers of a request."""

_SLICE_BYTES = 8_192
"""Most received bytes that are parsed per turn of the event loop.

uvloop passes up to 256,000 bytes at once: 40,000 chunks of a body, or 14,000 requests.
"""


class _OneWrite:
    """A transport that holds the head of an answer until the body follows, or the answer ends.

    uvicorn writes them one after the other: two system calls and two packets for each small answer.
    A process that was killed between them left half an answer, which a balancer cannot send again
    to another replica.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None  # None: not written yet; empty: written
        self.get_extra_info, self.is_closing = transport.get_extra_info, transport.is_closing
        self.pause_reading, self.resume_reading = transport.pause_reading, transport.resume_reading
        self.get_write_buffer_size, self.abort = transport.get_write_buffer_size, transport.abort

    def write(self, data: bytes) -> None:
        """Hold the head, or write a part of the body; see `asyncio.WriteTransport`."""
        if self._head is None and not data.startswith(b"HTTP/1.1 100 "):
            self._head = data
            return
        if self._head:
            if len(data) <= 65_536:  # more bytes are not copied
                data = self._head + data
            else:
                self._transport.write(self._head)
            self._head = b""
        if not self.is_closing():  # else uvloop raises, and nobody would read it
            self._transport.write(data)

    def end_answer(self) -> None:
        """Write a held head; the next bytes are of another answer."""
        if self._head and not self.is_closing():
            self._transport.write(self._head)
        self._head = None

    def close(self) -> None:
        """Write a held head and close the connection; see `asyncio.BaseTransport`."""
        self.end_answer()
        self._transport.close()


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
    """One connection, the `routes.Connection` of its requests. `closed` is called at its end."""

    def __init__(
        self, *, table: ConnectionTable, closed: Callable[[Connection], None], **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.app_state = {CONNECTION: self}
        self.timeout_keep_alive = table.idle_timeout_s  # type: ignore[assignment]
        self._table, self._closed = table, closed
        self._unparsed = b""
        self._header_bytes = 0
        self._progress = False  # whether received bytes have caused a parser event
        self._in_head = False
        self._timer: asyncio.TimerHandle | None = None  # ends the connection
        self._unread_timer: asyncio.TimerHandle | None = None  # ends it while it is not read
        self.is_lost = False
        self.on_lost: Callable[[], None] | None = None
        self.address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, or refuse it; see `asyncio.Protocol`."""
        super().connection_made(cast(asyncio.Transport, _OneWrite(transport)))
        self.flow = _Flow(self)
        self.address = self.client[0] if self.client else ""
        if (reason := self._table.opened(self)) is not None:
            self._refuse(503, reason, "retry-after: 1\r\n")
        elif self._table.is_draining:
            self.shutdown()
        else:
            self._end_after(self._table.idle_timeout_s, "it sent no request in time")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; see `asyncio.Protocol`."""
        self._stop_timer()
        self._unset_keepalive_if_required()
        self._table.closed(self)
        self.resume_writing()
        super().connection_lost(exc)
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()
        self._closed(self)
        self.app_state.clear()  # this and the following refer to the connection
        self.scope = self.cycle = self.parser = self.flow = None  # type: ignore[assignment]

    def end(self, reason: str) -> None:
        """Close the connection, even if its client does not read."""
        log.debug("a connection was closed: %s", reason)
        self._stop_timer()
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.close()

    def _end_after(self, seconds: float, reason: str) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self.end, reason)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pause_writing(self) -> None:
        """Begin to wait for the client to read; see `asyncio.Protocol`."""
        super().pause_writing()
        limit_s, reason = self._table.answer_timeout_s, "it does not read its answer"
        self._unread_timer = self.loop.call_later(limit_s, self.end, reason)

    def resume_writing(self) -> None:
        """Go on writing, since the client has read a part; see `asyncio.Protocol`."""
        if self._unread_timer is not None:
            self._unread_timer.cancel()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, or let them wait behind others."""
        is_waiting = bool(self._unparsed)
        self._unparsed += data
        if not is_waiting:
            self.parse()

    def parse(self) -> None:
        """Parse a slice of the received bytes, unless reading is paused."""
        if self.transport.is_closing() or self.flow.read_paused:
            return
        data, self._unparsed = self._unparsed[:_SLICE_BYTES], self._unparsed[_SLICE_BYTES:]
        self._progress = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse_error(error)
        if self._in_head and self._timer is None:
            reason = "the headers of its request did not arrive in time"
            self._end_after(self._table.header_timeout_s, reason)
        self._header_bytes = 0 if self._progress else self._header_bytes + len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            message = f"the request's headers have more than {MAX_HEADER_BYTES} bytes, the limit"
            self._refuse(431, message)
        if self._unparsed:
            self.transport.pause_reading()
            if not self.flow.read_paused:
                self.loop.call_soon(self.parse)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """Parse a request again, and what follows, without its offer to change the protocol.

        Such an offer is ignored (RFC 9110, section 7.8). A parser ends after the head of a request
        with an offer: its body would be in the other protocol. So a new parser gets that head.
        """
        if self.parser.get_method() == b"CONNECT":
            message = "the server is no proxy: it does not answer CONNECT"
            self._refuse(405, message, "allow: GET, HEAD, POST\r\n")
            return
        version = self.parser.get_http_version().encode()
        first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)
        fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        self._unparsed = b"\r\n".join((first, *fields, b"", rest)) + self._unparsed
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def _refuse_error(self, error: httptools.HttpParserError) -> None:
        if self.parser.get_method() == b"PRI":  # the first bytes of HTTP/2
            self._refuse(505, "the server speaks HTTP/1.1 only, not HTTP/2")
            return
        is_url = isinstance(error.__context__, httptools.HttpParserInvalidURLError)
        problem = "its target is not a URL" if is_url else error  # not the client's text
        self._refuse(400, f"the request is not HTTP/1.1: {problem}")

    def on_message_begin(self) -> None:
        """Note the first byte of a request."""
        self._progress = self._in_head = True
        if self._timer is not None:
            self._stop_timer()
        self._unset_keepalive_if_required()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begin a request, or queue it behind others of a pipeline."""
        self._progress = True
        if self.parser.should_upgrade():  # its head comes again; see `_feed_without_upgrade`
            return
        self._in_head = False
        if self._timer is not None:
            self._stop_timer()
        self._unset_keepalive_if_required()  # an answer to an earlier request has set it
        self._table.idle.pop(self, None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of the request."""
        self._progress = True
        if not self.parser.should_upgrade():  # else its head comes again
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request, or until the client has read the last answer."""
        if self.is_lost:
            return
        cast(_OneWrite, self.transport).end_answer()
        super().on_response_complete()
        if self.transport.is_closing():
            self._end_after(self._table.answer_timeout_s, "it does not read its answer")
        elif self.cycle.response_complete:
            self._table.idle[self] = None  # else the next request of a pipeline has begun

    def timeout_keep_alive_handler(self) -> None:
        """End the connection, which has sent no further request in time."""
        self.end("it sent no request in time")

    def shutdown(self) -> None:
        """End the connection after its request. The drain waits 5 s for a body."""
        super().shutdown()
        if not self.transport.is_closing() and self.cycle.more_body:
            self.loop.call_later(5.0, self._end_half_sent)

    def _end_half_sent(self) -> None:
        if self.cycle is not None and self.cycle.more_body:
            self.end("its body did not arrive during the drain")

    def _refuse(self, status: int, message: str, headers: str = "") -> None:
        """Write an error, and close the connection. The table logs refused connections itself."""
        if status != 503:
            log.warning("a request was refused: %s", message)
        code = CODES_OF_STATUSES[status]
        body = orjson.dumps({"error": message, "error_type": "Validation", "code": code})
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            f"content-type: application/json\r\nx-error-code: {code}\r\n"
            f"content-length: {len(body)}\r\n"
            f"{headers}connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
