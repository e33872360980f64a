"""What is recorded of every request, its headers, and how its answer is written."""

import asyncio
import json
import logging
from contextlib import suppress
from typing import Any, cast

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from cloze.service.clock import CLOCK, Clock
from cloze.service.core import OTHER_ROUTE, ServedRequest
from cloze.service.errors import Rejection
from cloze.service.http.body import BytesResponse, RequestLimits
from cloze.service.http.bytes_held import ByteBudget
from cloze.service.http.record import Recorder
from cloze.service.http.routes import RECORD
from cloze.service.observe.logs import AccessLog, LineWriter, _line
from cloze.service.observe.metrics import Metrics
from tests.support.records import recorded, scope_of
from tests.support.virtual_time import VirtualClock

pytestmark = pytest.mark.anyio


class World:
    """A `Recorder` with an application, and what it has recorded."""

    def __init__(self, app: Any, clock: Clock = CLOCK) -> None:
        self.app = app
        self.metrics, self.written, self.is_ending = Metrics(["m@1"]), LineWriter(), False
        self.limits = RequestLimits(ByteBudget("bodies", 10**6), ByteBudget("answers", 10**6))
        log = AccessLog("json", logging.INFO, 1.0, frozenset(), self.written)
        self.log = log
        self.recorder = Recorder(
            self.metrics, log, None, self.limits, self._respond, lambda: self.is_ending, clock
        )
        self.sent: list[Any] = []

    async def _respond(self, _: Request, error: Exception) -> Response:
        return PlainTextResponse(type(error).__name__, 500)

    async def ask(
        self,
        path: str = "/embed",
        route: str | None = "/embed",
        headers: dict[str, str] | None = None,
        **noted: Any,
    ) -> None:
        self.record = recorded(path, x_request_id="mine", **(headers or {}))
        self.record.route = route or OTHER_ROUTE
        for name, value in noted.items():
            setattr(self.record, name, value)

        async def send(message: Any) -> None:
            self.sent.append(message)

        await self.recorder.answer(self.app, scope_of(self.record), cast(Any, None), send)

    @property
    def lines(self) -> list[str]:
        """The log lines that wait."""
        return [line if isinstance(line, str) else _line(*line) for line in self.written.waiting]

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
    record.texts, record.tokens = 2, 7
    record.tokenize_s, record.queue_s, record.inference_s = 0.001, 0.002, 0.003
    await PlainTextResponse("ok")(scope, receive, send)


def test_an_answer_has_an_id_and_its_model() -> None:
    world = World(answers, VirtualClock(10.0))
    asyncio.run(world.ask(arrived=8.0))
    assert world.headers[b"x-request-id"] == b"mine"
    assert world.headers[b"x-model"] == b"m@1"
    assert [message["type"] for message in world.sent] == [
        "http.response.start", "http.response.body",
    ]  # fmt: skip
    [line] = world.lines
    for part in ('"id":"mine"', '"method":"POST"', '"route":"/embed"', '"status":200',
                 '"model":"m@1"', '"texts":2', '"tokens":7', '"total":2000'):  # fmt: skip
        assert part in line
    assert "error" not in line
    counted = [line for line in world.series() if 'route="/embed"' in line and "count" in line]
    assert counted
    assert 'status="200"' in "".join(world.series())
    assert world.metrics.in_flight == 0


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
    [line] = world.lines
    assert '"status":500' in line
    assert '"error":"ValueError"' in line
    assert any('reason="memory"' in line for line in world.series())
    assert world.metrics.in_flight == 0

    async def breaks(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("secret")

    world = World(breaks)
    with pytest.raises(ValueError, match="secret"):
        asyncio.run(world.ask())
    assert len(world.sent) == 1, "an answer that has begun is not begun again"
    assert '"status":200' in world.lines[0]


def test_a_request_without_a_result_costs_its_key_no_tokens() -> None:
    class Key:
        name, taken = "k", 7

        def take_tokens(self, tokens: int, now: float) -> None:
            self.taken += tokens

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("x", 500)(scope, receive, send)

    key = Key()
    for app, left in ((answers, 7), (fails, 0)):
        world = World(app)
        asyncio.run(world.ask(key=key, tokens=7))
        assert key.taken == left
        assert world.record.tokens == left
        assert (world.record.connection, world.record.trace) == (None, None)


async def test_the_bytes_of_an_answer_are_released_however_it_ends() -> None:
    async def breaks(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError

    for app in (answers, breaks):
        world, one, other = World(app), recorded(), recorded(client="b")
        await world.limits.hold_answer(one, 600_000)
        waiting = asyncio.create_task(world.limits.hold_answer(other, 600_000))
        await asyncio.sleep(0)
        assert not waiting.done()
        with suppress(ValueError):
            await world.ask(answer=one.answer)
        await waiting


def test_a_connection_ends_with_an_answer_of_a_server_that_drains() -> None:
    world = World(answers)
    asyncio.run(world.ask())
    assert b"connection" not in world.headers
    world.is_ending = True
    world.sent.clear()
    asyncio.run(world.ask())
    assert world.headers[b"connection"] == b"close"


@pytest.mark.parametrize(("received", "closes"), [(0, True), (5, False), (None, False)])
def test_a_client_that_may_send_its_body_or_not_is_closed(
    received: int | None, closes: bool
) -> None:
    """It asked whether to send its body, and got an answer instead."""
    world = World(answers)
    asyncio.run(world.ask(headers={"expect": "100-continue"}, received=received))
    assert (b"connection" in world.headers) == closes


@pytest.mark.parametrize("size", [0, 65_536, 65_537, 200_000])
async def test_a_large_body_is_sent_in_parts_one_after_another(size: int) -> None:
    sent: list[Any] = []
    body, may_go_on = bytes(number % 251 for number in range(size)), asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message)
        await may_go_on.wait()

    response = BytesResponse(body, b"text/plain", (b"x-more", b"1"))
    task = asyncio.create_task(response(scope_of(recorded()), cast(Any, None), send))
    await asyncio.sleep(0.01)
    assert len(sent) == 1
    may_go_on.set()
    await task
    start, *parts = sent
    assert dict(start["headers"]) == {
        b"content-length": b"%d" % size, b"content-type": b"text/plain", b"x-more": b"1",
    }  # fmt: skip
    assert b"".join(part["body"] for part in parts) == body
    assert all(len(part["body"]) <= 65_536 for part in parts)
    more = [part.get("more_body", False) for part in parts]
    assert more == [True] * (len(parts) - 1) + [False]


def logged(level: int, share: float = 1.0, times: int = 1) -> list[str]:
    """Return the requests that have a line, out of one of each kind."""
    writer = LineWriter()
    log = AccessLog("json", level, share, frozenset({"/health"}), writer)
    ended: dict[str, Any] = {"ended": 1.5, "identity": b"r1", "seconds": 0.01}
    for route, statuses in (("/embed", (200, 400, 500)), ("/health", (200, 503))):
        for status in statuses * times:
            log.add(ServedRequest(route=route, status=status, **ended))
    lines = [json.loads(_line(*each)) for each in writer.waiting]
    return [f"{line['route']} {line['status']}" for line in lines]


def test_which_requests_are_logged() -> None:
    errors = ["/embed 400", "/embed 500", "/health 503"]
    assert logged(logging.INFO) == ["/embed 200", *errors]
    assert logged(logging.WARNING) == errors
    assert logged(logging.ERROR) == errors[1:]
    assert logged(logging.DEBUG) == ["/embed 200", *errors[:2], "/health 200", "/health 503"]
    assert logged(logging.INFO, share=0.0) == errors
    assert 10 < logged(logging.INFO, share=0.3, times=200).count("/embed 200") < 120
