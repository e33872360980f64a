"""What is recorded of every request, its headers, and how its answer is written."""

import asyncio
import logging
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from cloze.service.core import Overloaded, Rejection, Timings
from cloze.service.http import routes as routes_module
from cloze.service.http.memory_limit import Hold, UnreadAnswers
from cloze.service.http.record import RECORD, Access
from cloze.service.http.routes import OTHER_ROUTE, DirectRoutes, Recorder
from cloze.service.observe.logs import AccessLog, AccessRecord, RequestCost
from cloze.service.observe.metrics import Metrics
from cloze.service.server.connection import OneWrite
from tests.records import recorded, scope_of

OPEN = Access(needs_keys=False, open_routes=frozenset(), permissions=(), hosts=frozenset())


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)

    def flush(self, wait_s: float) -> None:
        pass


class Reader:
    def unread_bytes(self) -> int:
        return 1

    def unsent_bytes(self) -> int:
        return 1

    def end(self, reason: str) -> None:
        raise NotImplementedError


class World:
    """A `Recorder` with an application, and what it has recorded."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.metrics, self.written, self.answers = Metrics(["m@1"]), Lines(), UnreadAnswers(10**6)
        log = AccessLog("json", logging.INFO, 1.0, frozenset(), cast(Any, self.written))
        self.log = log
        self.recorder = Recorder(self.metrics, log, None, self.answers, self._respond)
        self.sent: list[Any] = []

    async def _respond(self, _: Request, error: Exception) -> Response:
        return PlainTextResponse(type(error).__name__, 500)

    async def ask(self, path: str = "/embed", route: str | None = "/embed", **noted: Any) -> None:
        self.record = recorded(path, x_request_id="mine")
        self.record.route = route
        for name, value in noted.items():
            setattr(self.record, name, value)

        async def send(message: Any) -> None:
            self.sent.append(message)

        try:
            await self.recorder.answer(self.app, scope_of(self.record), cast(Any, None), send)
        finally:
            self.log.flush(0)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    def series(self) -> list[str]:
        text = self.metrics.exposition("")[0].decode()
        return [
            line for line in text.splitlines() if line.startswith("cloze") and line[-4:] != " 0.0"
        ]


async def answers(scope: Any, receive: Any, send: Any) -> None:
    record = scope[RECORD]
    record.model = "m@1"
    record.cost = RequestCost(2, 7, Timings(0.001, 0.002, 0.003))
    await PlainTextResponse("ok")(scope, receive, send)


def test_an_answer_has_an_id_and_its_model() -> None:
    world = World(answers)
    asyncio.run(world.ask())
    assert world.headers[b"x-request-id"] == b"mine"
    assert world.headers[b"x-model"] == b"m@1"
    assert [message["type"] for message in world.sent] == [
        "http.response.start", "http.response.body",
    ]  # fmt: skip
    [line] = world.written.lines
    for part in ('"id":"mine"', '"method":"POST"', '"route":"/embed"', '"status":200',
                 '"model":"m@1"', '"texts":2', '"tokens":7'):  # fmt: skip
        assert part in line
    assert "error" not in line
    counted = [line for line in world.series() if 'route="/embed"' in line and "count" in line]
    assert counted
    assert 'status="200"' in "".join(world.series())
    assert world.metrics.in_flight == 0


def test_a_traced_request_ends_its_span_with_what_is_logged() -> None:
    ended: list[AccessRecord] = []

    class Trace:
        def end(self, answered: AccessRecord) -> None:
            ended.append(answered)

    world = World(answers)
    asyncio.run(world.ask(trace=Trace()))
    [answered] = ended
    assert (answered.route, answered.status, answered.model) == ("/embed", 200, "m@1")


def test_routes_are_those_that_are_known() -> None:
    async def plain(scope: Any, receive: Any, send: Any) -> None:
        assert world.metrics.in_flight == 1
        await PlainTextResponse("x", 404)(scope, receive, send)

    world = World(plain)
    for path, route in (("/of/a", "/of/{x}"), ("/secret", None)):
        world.sent.clear()
        asyncio.run(world.ask(path, route))
        assert f'"route":"{route or OTHER_ROUTE}"' in world.written.lines[-1]
        assert b"x-model" not in world.headers
        assert '"model"' not in world.written.lines[-1]
    assert OTHER_ROUTE == "other"
    assert not any("secret" in line for line in (*world.series(), *world.written.lines))


def test_a_bug_is_answered_with_an_id_and_raised() -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        scope[RECORD].error, scope[RECORD].rejection = "ValueError", Rejection.MEMORY
        raise ValueError("secret")

    world = World(fails)
    with pytest.raises(ValueError, match="secret"):
        asyncio.run(world.ask())
    assert world.sent[0]["status"] == 500
    assert world.headers[b"x-request-id"] == b"mine"
    assert world.sent[1]["body"] == b"ValueError"
    [line] = world.written.lines
    assert '"status":500' in line
    assert '"error":"ValueError"' in line
    assert any('reason="memory"' in line for line in world.series())
    assert world.metrics.in_flight == 0


def test_an_answer_that_has_begun_is_not_begun_again() -> None:
    async def breaks(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError

    world = World(breaks)
    with pytest.raises(ValueError):  # noqa: PT011
        asyncio.run(world.ask())
    assert len(world.sent) == 1
    assert '"status":200' in world.written.lines[0]


def test_a_request_without_an_answer_counts_as_an_error() -> None:
    async def leaves(scope: Any, receive: Any, send: Any) -> None:
        pass

    world = World(leaves)
    asyncio.run(world.ask())
    assert '"status":500' in world.written.lines[0]


def test_the_time_of_a_request_begins_when_it_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_module.time, "monotonic", lambda: 10.0)
    world = World(answers)
    asyncio.run(world.ask(arrived=8.0))
    assert '"total":2000' in world.written.lines[0]
    asyncio.run(world.ask(arrived=10.0))
    assert '"total":0' in world.written.lines[1]


def test_a_large_answer_is_held_until_its_connection_has_read_it() -> None:
    async def run() -> None:
        world, reader = World(answers), Reader()
        world.answers._memory.grow_now(hold := Hold("a"), 80_000)
        await world.ask(hold=hold, connection=reader)
        assert world.answers.is_reading(reader)
        assert world.record.hold is None
        world.answers._memory.grow_now(other := Hold("a"), 80_000)
        await world.ask(hold=other)
        assert other.size == 0, "a connection that is lost reads nothing"
        world.answers.was_read(reader)

    asyncio.run(run())


def test_an_error_of_a_direct_handler_is_answered() -> None:
    async def fails(_: Request) -> Response:
        raise Overloaded("full", 1)

    async def bug(_: Request) -> Response:
        raise ValueError

    world = World(answers)
    world.app = DirectRoutes(answers, {"/embed": fails, "/of/x": bug}, OPEN, world._respond)
    asyncio.run(world.ask())
    assert world.sent[1]["body"] == b"Overloaded"
    with pytest.raises(ValueError):  # noqa: PT011
        asyncio.run(world.ask("/of/x"))


# ---- one write ---------------------------------------------------------------------------------


class Written:
    def __init__(self) -> None:
        self.events: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.events.append(data)

    def close(self) -> None:
        self.events.append("close")

    def is_closing(self) -> bool:
        return "close" in self.events


def test_a_head_is_written_with_its_body() -> None:
    def events(*writes: bytes) -> list[bytes | str]:
        recorder = Written()
        transport = OneWrite(cast(asyncio.Transport, recorder))
        for data in writes:
            transport.write(data)
        return recorder.events

    assert events(b"head ") == []
    assert events(b"head ", b"body", b"more") == [b"head body", b"more"]
    assert events(b"head", b"") == [b"head"]
    assert events(b"head", b"", b"", b"x") == [b"head", b"", b"x"]
    limit = bytes(65_536)
    assert events(b"head", limit) == [b"head" + limit]
    large = limit + b"1"
    assert events(b"head", large) == [b"head", large]
    assert events(b"head", large)[1] is large, "it is not copied"
    go_on = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert events(go_on) == [go_on], "at once"
    assert events(go_on, b"head ", b"body") == [go_on, b"head body"]
    assert events(b"head ", go_on) == [b"head " + go_on]


def test_a_close_writes_a_head_once() -> None:
    recorder = Written()
    transport = OneWrite(cast(asyncio.Transport, recorder))
    assert not transport.is_closing()
    transport.close()
    assert recorder.events == ["close"]
    recorder = Written()
    transport = OneWrite(cast(asyncio.Transport, recorder))
    transport.write(b"head")
    transport.close()
    transport.close()
    assert recorder.events == [b"head", "close", "close"]
    assert transport.is_closing()
