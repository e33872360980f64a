"""The processor time of a refusal before the body, beside an answer of a bare ASGI application.

python bench/studies/refusal_cost.py

Both run in uvicorn's protocol on a transport that discards what is written, so that parsing,
deciding and writing count, and sockets do not.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from cloze.service.core import ExpectedWait
from cloze.service.server.acceptor import ConnectionLimits, ConnectionTable
from cloze.service.server.connection import ServerProtocol
from cloze.service.service import single_process
from cloze.service.settings import Settings

REQUEST = (
    b"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b'content-length: 22\r\n\r\n{"inputs": "a b c d" }'
)
COUNT, ROUNDS = 2000, 20


class NoTransport(asyncio.Transport):
    """Discards what is written."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Do nothing."""

    def is_closing(self) -> bool:
        """Return False."""
        return False

    def resume_reading(self) -> None:
        """Do nothing."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the addresses of a connection."""
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default


async def bare(_: Scope, receive: Receive, send: Send) -> None:
    """Answer 200 with a small body."""
    await receive()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


async def cost_us(make: Callable[[], HttpToolsProtocol]) -> float:
    """Return the processor microseconds per request of the fastest round."""
    protocol = make()
    protocol.connection_made(NoTransport())
    fastest = float("inf")
    for _ in range(ROUNDS):
        started = time.thread_time()
        for _ in range(COUNT):
            protocol.data_received(REQUEST)
            while protocol.tasks:
                await asyncio.sleep(0)
        fastest = min(fastest, time.thread_time() - started)
    return fastest / COUNT * 1e6


async def main() -> None:
    """Print both figures."""
    logging.disable()
    service = single_process(Settings(model=("cloze-bert",), access_log_share=0, log_level="error"))
    queue = service.snapshot.models.pipelines[0].model.queue
    queue.expected_wait = lambda *_: ExpectedWait(5.0, 0.001)  # type: ignore[method-assign]
    config = uvicorn.Config(bare, log_level="critical", access_log=False)
    config.load()
    table = ConnectionTable(ConnectionLimits(10, 75, 1000))

    def refusing() -> HttpToolsProtocol:
        return ServerProtocol(
            admit=service.admit,
            table=table,
            answers=service.answers,
            starts=service.starts,
            returns=service.returns,
            config=config,
            server_state=ServerState(),
            app_state={},
        )

    def answering() -> HttpToolsProtocol:
        return HttpToolsProtocol(config, ServerState(), {})

    print(f"a refusal: {await cost_us(refusing):.0f} us")
    print(f"a bare ASGI application: {await cost_us(answering):.0f} us")
    service.close()


if __name__ == "__main__":
    uvloop.run(main())
