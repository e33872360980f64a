"""What the service uses of uvicorn beyond its documentation.

No other module imports uvicorn's inner modules. `tests/test_uvicorn.py` has a test for each name of
`USED` and `OVERRIDDEN`, which fails if an upgrade of uvicorn removes the name, or calls it no more.
"""

import asyncio
from typing import Final

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = [
    "ASGI3Application",
    "FlowControl",
    "HttpToolsProtocol",
    "OneWrite",
    "RequestResponseCycle",
]

USED: Final = {
    "protocol": {
        "_unset_keepalive_if_required",
        "client",
        "cycle",
        "expect_100_continue",
        "flow",
        "loop",
        "parser",
        "pipeline",
        "scope",
        "transport",
        "url",
    },
    "cycle": {
        "disconnected",
        "keep_alive",
        "more_body",
        "response_complete",
        "response_started",
        "scope",
        "transport",
    },
    "flow": {"read_paused", "write_paused"},
    "server": {"config", "lifespan", "server_state", "servers"},
    "config": {"encoded_headers", "timeout_graceful_shutdown"},
    "state": {"connections", "tasks"},
    "lifespan": {"state"},
}
"""The attributes that the service uses, by the object that has them: `HttpToolsProtocol`,
`RequestResponseCycle`, `FlowControl`, `Server`, `Config`, `ServerState` and `LifespanOn`.
"""

OVERRIDDEN: Final = {
    "protocol": {"_start_asgi_task", "on_response_complete", "shutdown"},
    "flow": {"resume_reading"},
    "server": {"handle_exit", "on_tick", "shutdown", "startup"},
}
"""The methods of uvicorn that the service overrides, and that uvicorn calls."""

_LARGE: Final = 65_536
"""A body of more bytes is not copied behind its head."""

_CONTINUE: Final = b"HTTP/1.1 100 "


class OneWrite:
    """The transport of one request; it holds the head of its answer until the body follows.

    uvicorn writes them one after the other: two system calls and two packets for each small answer.
    A process that was killed between them left half an answer, which a balancer cannot send again
    to another replica. Not for HEAD: no body follows.

    Args:
        transport: the transport of the connection.
    """

    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None  # None: not written yet; empty: written

    def write(self, data: bytes) -> None:
        """Hold the head, or write a part of the body; see `asyncio.WriteTransport`."""
        if self._head is None:
            if data.startswith(_CONTINUE):
                self._transport.write(data)
            else:
                self._head = data
            return
        if self._head and len(data) <= _LARGE:
            data, self._head = self._head + data, b""
        self._flush()
        self._transport.write(data)

    def is_closing(self) -> bool:
        """Whether the connection is closed; see `asyncio.BaseTransport`."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Write a held head and close the connection; see `asyncio.BaseTransport`."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""
