"""Accepts the connections of a listening socket, several per turn of the event loop.

libuv, and so uvloop, accepts one connection per turn. A turn of a busy server handles hundreds of
requests, so new connections, probes among them, would wait for minutes in the listening queue.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from ssl import SSLContext

from cloze.service.http.probes import Probes

log = logging.getLogger("cloze")

_ACCEPTS_PER_TURN = 16
"""Most connections per turn. More would let one of several processes take all of a burst."""

_PAUSE_S = 0.2
"""Time without accepting after the process has run out of files or memory."""

_HANDSHAKE_S = 10.0
"""Longest duration of a TLS handshake."""

_TLS_CLOSE_S = 1.0
"""Longest wait for a client's part in the end of TLS; an idle client may not notice it."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Makes a protocol for each accepted connection, until `close`.

    Args:
        listener: a socket that listens.
        make_protocol: returns the protocol of a connection.
        tls: the certificate of the server; None: no TLS.
        probes: answers probes that have arrived with their connection; not used with TLS.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: SSLContext | None,
        probes: Probes,
    ) -> None:
        self._listener, self._make_protocol, self._tls = listener, make_protocol, tls
        self._probes = probes
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._closed = False
        listener.setblocking(False)
        self._resume()

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                log.error("connections wait: %s", error.strerror)
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_PAUSE_S, self._resume)
                return
            connection.setblocking(False)
            if self._tls is None and self._probes.answers(connection):
                continue
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=_HANDSHAKE_S if self._tls else None,
                ssl_shutdown_timeout=_TLS_CLOSE_S if self._tls else None,
            )
        except (OSError, EOFError):  # the client has gone, or speaks no TLS
            connection.close()

    @property
    def is_opening(self) -> bool:
        """Whether an accepted connection has no protocol yet."""
        return bool(self._opening)

    def close(self) -> None:
        """Accept no further connection."""
        self._closed = True
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Wait for the connections that are being opened."""
        if self._opening:
            await asyncio.wait(self._opening)
