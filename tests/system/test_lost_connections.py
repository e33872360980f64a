"""Connections that are lost at any time, over real sockets, leave nothing behind."""

import asyncio
import gc
import random
import time
from contextlib import suppress

import pytest
import uvicorn
import uvloop
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from cloze.service.batching.fair_queue import LineKey
from cloze.service.errors import ServiceError
from cloze.service.http.body import BytesResponse, RequestLimits
from cloze.service.http.bytes_held import ByteBudget, Hold
from cloze.service.http.door import StartQueue
from cloze.service.http.record import Callers
from cloze.service.http.routes import RECORD
from cloze.service.server.acceptor import ConnectionTable
from cloze.service.server.connection import ServerProtocol
from cloze.service.settings import Settings
from cloze.service.threads import run_on_thread

MB = 2**20
LINE = LineKey(0, 0)


class World:
    """A server whose requests wait for everything that a request may wait for."""

    def __init__(self) -> None:
        self.limits = RequestLimits(ByteBudget("bodies", 3 * MB), ByteBudget("answers", 4 * MB))
        self.starts, self.state = StartQueue(), ServerState()
        self.table = ConnectionTable(
            Settings(header_timeout_ms=300, idle_timeout_ms=500, request_timeout_ms=400), 1000
        )
        self.callers = Callers(timeout_s=0.5)
        self.config = uvicorn.Config(
            self.app, log_config=None, ws="none", interface="asgi3", proxy_headers=False
        )
        self.config.load()

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = scope[RECORD] = self.callers.record(scope, scope["path"])
        request = Request(scope, receive)
        response: Response
        try:
            await self.starts.wait(random.choice("abc"), LINE, 5)
            try:
                with self.limits.request(request):
                    await self.limits.read(request, MB)
                    await run_on_thread(time.sleep, random.random() * 0.02)
                    await self.limits.begin_answer(record)
                    response = BytesResponse(bytes(random.choice([10, MB // 2])))
                    await self.limits.hold_answer(record, len(response.body))
            except ServiceError as error:
                response = PlainTextResponse(str(error), 429)
            await response(scope, receive, send)
        finally:
            self.limits.sent(record)

    def protocol(self) -> ServerProtocol:
        return ServerProtocol(
            table=self.table, closed=lambda _: None, config=self.config,
            server_state=self.state, app_state={},
        )  # fmt: skip


async def behave_badly(port: int) -> None:
    """Send requests, of which some are not whole, read some of the answers, and leave."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(OSError, RuntimeError, TimeoutError):  # uvloop's of a closed transport
        for _ in range(random.randrange(1, 4)):
            size = random.choice([0, 100, 200_000, 600_000])
            head = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
            writer.write(head + bytes(random.choice([size, size // 2, size])))
            if random.random() < 0.3:
                await asyncio.sleep(random.random() * 0.3)
        if random.random() < 0.5:
            await asyncio.wait_for(reader.read(random.choice([10, 100_000])), 0.5)
        if random.random() < 0.3:
            writer.transport.abort()
    writer.close()


async def room(budget: ByteBudget, size: int) -> None:
    """Fail unless others may have so many bytes, or other units, at once."""
    first, other = Hold("first"), Hold("other")
    await budget.grow(first, 1, 0.0)
    await budget.grow(other, size - 1, 0.0)
    budget.release(first)
    budget.release(other)


@pytest.mark.parametrize("seed", [1, 2])
def test_connections_that_are_lost_at_any_time_leave_nothing(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    random.seed(seed)

    async def run() -> None:
        world, loop = World(), asyncio.get_running_loop()
        errors: list[object] = []
        loop.set_exception_handler(lambda _, context: errors.append(context))
        server = await loop.create_server(world.protocol, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for _ in range(2):
            await asyncio.gather(*(behave_badly(port) for _ in range(60)))
        server.close()
        async with asyncio.timeout(30):
            while world.state.connections or world.state.tasks:
                await asyncio.sleep(0.05)
        assert (world.starts.waiting, *world.starts.unsubmitted) == (0,)
        await room(world.limits.bodies, 3 * MB)
        await room(world.limits.answers, 4 * MB)
        await room(world.limits.writers, 3)
        assert not world.table.idle
        await asyncio.sleep(0.6)  # so that timers would have ended
        gc.collect()
        assert not any(issubclass(type(each), ServerProtocol) for each in gc.get_objects())
        assert not errors
        assert not [record for record in caplog.records if record.levelname == "ERROR"]

    uvloop.run(run())
