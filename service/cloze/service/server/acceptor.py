"""Accepts connections, as many as the limits allow, and answers probes at once."""

import asyncio
import errno
import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from random import getrandbits
from ssl import SSLContext
from typing import Final

from cloze.service.clock import CLOCK, Clock
from cloze.service.http.record import is_accepted
from cloze.service.http.routes import Connection
from cloze.service.observe.logs import LineLimit
from cloze.service.settings import Settings

log = logging.getLogger("cloze")

_ACCEPTS_PER_TURN = 16
"""Most connections per turn. More would let one of several processes take all of a burst."""

_PAUSE_S = 0.2
"""Time without accepting after the process has run out of files or memory."""

_PROBE_HEADERS: Final = frozenset(
    {b"host", b"user-agent", b"accept", b"accept-encoding", b"connection"}
)
"""Headers that leave the answer to a probe as it is."""


class ConnectionTable:
    """The open connections of a process, and their limits.

    Attributes:
        header_timeout_s: longest time from the first byte of a request to the end of its headers.
        idle_timeout_s: longest time without a request.
        answer_timeout_s: longest time in which a client reads nothing of its answer.
        is_draining: whether a connection that opens now ends at once. Its client began to connect
            before the drain, for example by a TLS handshake.
        closed_count: number of connections that have closed; the owner may reset it.
        idle: the connections without a request; the one that is idle for longest is first.
    """

    def __init__(self, settings: Settings, max_connections: int, clock: Clock = CLOCK) -> None:
        self.header_timeout_s = settings.header_timeout_ms / 1000
        self.idle_timeout_s = settings.idle_timeout_ms / 1000
        self.answer_timeout_s = settings.request_timeout_ms / 1000
        self._most, self._most_per_address = max_connections, settings.max_connections_per_address
        self._clock = clock
        self._refusals = LineLimit()
        self.is_draining = False
        self.closed_count = 0
        self._open = 0
        self._by_address: Counter[str] = Counter()
        self.idle: dict[Connection, None] = {}

    def opened(self, connection: Connection) -> str | None:
        """Count a new connection, which may end an idle one; return why it is refused, or None.

        The log has a few refusals per second.
        """
        self._open += 1
        self._by_address[connection.address] += 1
        self.idle[connection] = None
        own, most = self._by_address[connection.address], self._most_per_address
        oldest, reason = next(iter(self.idle)), None
        if most and own > most:
            reason = f"the address has {own} connections, and {most} at most"
        elif self._open > self._most and oldest is connection:
            reason = f"the server has {self._most} connections, the most"
        elif self._open > self._most:
            del self.idle[oldest]  # several connections may open before this one has closed
            oldest.end("it made room for a new one")
        if reason is not None:
            left_out = self._refusals.left_out("connection", self._clock.monotonic())
            if left_out is not None:
                others = f"; {left_out} others have no line" if left_out else ""
                log.warning("a connection was refused: %s%s", reason, others)
        return reason

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self._open -= 1
        self.closed_count += 1
        self.idle.pop(connection, None)
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]


@dataclass(frozen=True, slots=True)
class Probes:
    """Answers probes on connections that were just accepted.

    In a busy server, a request on a new connection waits for four turns of the event loop, and a
    turn may take 30 ms. A supervisor that gives a probe little time would restart a server that is
    only busy. A probe whose bytes are there when its connection is accepted is answered in the same
    turn. Only the plainest probe is, which asks for ``Connection: close`` as Kubernetes does; all
    else goes the usual way.

    Attributes:
        bodies: path -> a function that returns the body of the answer with status 200; None: the
            usual way answers.
        hosts: names in the Host header that are accepted besides addresses; empty: any.
    """

    bodies: Mapping[bytes, Callable[[], bytes | None]]
    hosts: frozenset[bytes]

    def answers(self, connection: socket.socket) -> bool:
        """Answer a probe that has arrived, and close its connection.

        Returns:
            Whether it was a probe. If not, nothing was read from the connection.
        """
        try:
            received = connection.recv(1024, socket.MSG_PEEK)  # probes are shorter
            if (answer := self._answer(received)) is None:
                return False
            connection.recv(len(received))  # a close discards the answer if bytes were not read
            connection.send(answer)
        except OSError:  # nothing has arrived, or the client has gone
            return False
        connection.close()
        return True

    def _answer(self, received: bytes) -> bytes | None:
        """Return the answer to received bytes; None if they are not exactly a probe."""
        if not received.startswith(b"GET /") or not received.endswith(b"\r\n\r\n"):
            return None
        line, *headers = received[:-4].split(b"\r\n")
        path, _, version = line.removeprefix(b"GET ").partition(b" ")
        pairs = [header.partition(b":") for header in headers]
        values = {name.lower(): value.strip() for name, _, value in pairs}
        host = values.get(b"host")
        is_probe = (
            path in self.bodies
            and version == b"HTTP/1.1"
            and len(values) == len(pairs)
            and _PROBE_HEADERS.issuperset(values)
            and values.get(b"connection", b"").lower() == b"close"
            and host is not None
            and (not self.hosts or is_accepted(host, self.hosts, or_address=True))
        )
        if not is_probe or (body := self.bodies[path]()) is None:
            return None
        head = (
            f"HTTP/1.1 200 OK\r\ndate: {formatdate(usegmt=True)}\r\n"
            f"content-length: {len(body)}\r\ncontent-type: application/json\r\n"
            f"x-request-id: {getrandbits(64):016x}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


@dataclass(slots=True, eq=False)
class Acceptor:
    """Accepts the connections of a listening socket, from `begin` to `close`.

    libuv, and so uvloop, accepts one connection per turn of the event loop. A turn of a busy server
    handles hundreds of requests, so new connections, probes among them, would wait for minutes in
    the listening queue. An acceptor accepts several per turn.

    Attributes:
        tls: returns the certificate for a connection that opens now, or None without TLS.
        probes: answers probes that have arrived with their connection; not used with TLS.
    """

    listener: socket.socket
    make_protocol: Callable[[], asyncio.Protocol]
    tls: Callable[[], SSLContext | None]
    probes: Probes
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    opening: set[asyncio.Task[None]] = field(default_factory=set)
    is_closed: bool = False

    def begin(self) -> None:
        """Begin to accept connections, or go on after a pause."""
        if not self.is_closed:
            self.listener.setblocking(False)
            self.loop.add_reader(self.listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _address = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                log.error("connections wait: %s", error.strerror)
                self.loop.remove_reader(self.listener)
                self.loop.call_later(_PAUSE_S, self.begin)
                return
            connection.setblocking(False)
            tls = self.tls()
            if tls is None and self.probes.answers(connection):
                continue
            task = self.loop.create_task(self._open(connection, tls))
            self.opening.add(task)
            task.add_done_callback(self.opening.discard)

    async def _open(self, connection: socket.socket, tls: SSLContext | None) -> None:
        try:
            await self.loop.connect_accepted_socket(
                self.make_protocol,
                connection,
                ssl=tls,
                ssl_handshake_timeout=10.0 if tls else None,
                ssl_shutdown_timeout=1.0 if tls else None,  # an idle client may not notice the end
            )
        except (OSError, EOFError):  # the client has gone, or speaks no TLS
            connection.close()

    def close(self) -> None:
        """Accept no further connection."""
        self.is_closed = True
        self.loop.remove_reader(self.listener)

    async def wait_closed(self) -> None:
        """Wait for the connections that are being opened."""
        if self.opening:
            await asyncio.wait(self.opening)
