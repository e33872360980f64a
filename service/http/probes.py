"""Answers probes that have arrived with their connection.

In a busy server, a request on a new connection waits for four turns of the event loop, and a turn
may take 30 ms. A supervisor that gives a probe little time would restart a server that is only
busy. A probe whose bytes are there when its connection is accepted is answered in the same turn.
Only the plainest probe is, which asks for ``Connection: close`` as Kubernetes does; all else goes
the usual way.
"""

import socket
from collections.abc import Callable, Mapping
from email.utils import formatdate
from random import getrandbits
from typing import Final

from cloze.service.http.access import is_accepted

_MOST_BYTES: Final = 1024
"""Longest request that is recognised as a probe."""

_HEADERS: Final = frozenset({b"host", b"user-agent", b"accept", b"accept-encoding", b"connection"})
"""Headers that leave the answer as it is."""


class Probes:
    """Answers probes on connections that were just accepted.

    Args:
        bodies: path -> a function that returns the body of the answer with status 200; None: the
            usual way answers.
        hosts: names in the Host header that are accepted; empty: any.
    """

    def __init__(
        self, bodies: Mapping[bytes, Callable[[], bytes | None]], hosts: frozenset[bytes]
    ) -> None:
        self._bodies, self._hosts = bodies, hosts

    def answers(self, connection: socket.socket) -> bool:
        """Answer a probe that has arrived, and close its connection.

        Args:
            connection: a connection that does not block.

        Returns:
            Whether it was a probe. If not, nothing was read from the connection.
        """
        try:
            received = connection.recv(_MOST_BYTES, socket.MSG_PEEK)
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
        if path not in self._bodies or version != b"HTTP/1.1":
            return None
        pairs = [header.partition(b":") for header in headers]
        values = {name.lower(): value.strip() for name, _, value in pairs}
        if len(values) < len(pairs) or not _HEADERS.issuperset(values):
            return None
        if values.get(b"connection", b"").lower() != b"close":
            return None
        host = values.get(b"host")
        if host is None or (self._hosts and not is_accepted(host, self._hosts)):
            return None
        if (body := self._bodies[path]()) is None:
            return None
        head = (
            f"HTTP/1.1 200 OK\r\ndate: {formatdate(usegmt=True)}\r\n"
            f"content-length: {len(body)}\r\ncontent-type: application/json\r\n"
            f"x-request-id: {getrandbits(64):016x}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body
