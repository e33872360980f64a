"""Which requests the door refuses before their bodies, what it says, and which ones start first."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message

from cloze.service.batching.admission import WaitLimits
from cloze.service.batching.fair_queue import ExpectedWait, LineKey, QueueState
from cloze.service.clock import Clock
from cloze.service.core import ServedRequest
from cloze.service.errors import Overloaded, Rejection, ServiceError, ShuttingDown
from cloze.service.http.door import Gate, StartQueue
from cloze.service.http.errors import describe_error
from cloze.service.http.record import Access, Callers, Paths
from cloze.service.http.returns import Returns
from cloze.service.http.routes import GateModel, Route, RouteDoc
from cloze.service.http.routing import create_app
from tests.support.records import Open, pairs, scope_of
from tests.support.virtual_time import LOOP_CLOCK, VirtualClock

pytestmark = pytest.mark.anyio

OPEN = Access(needs_keys=False, open_routes=frozenset(), permissions=(), hosts=frozenset())
CLOSED = Access(needs_keys=True, open_routes=frozenset(), permissions=(), hosts=frozenset())
CALLERS = Callers(max_timeout_s=60.0, clock=LOOP_CLOCK)


class Waiting:
    """A queue whose expected wait a test sets, and that records what it is asked."""

    state = QueueState(0, 0.0)
    dead_reason: str | None = None

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.asked: list[tuple[str, LineKey, int, int]] = []

    def expected_wait(
        self, client: str, line: LineKey, tokens: int, unsubmitted: int = 0
    ) -> ExpectedWait:
        self.asked.append((client, line, tokens, unsubmitted))
        return ExpectedWait(self.seconds, 0.5, lasts_s=0.5)

    def submit(self, *_: Any) -> None:
        raise NotImplementedError

    def close(self, timeout_s: float = 5.0) -> None:
        raise NotImplementedError


class Gated:
    """A gate before queues; the first one is the default's."""

    def __init__(self, *queues: Waiting, max_wait_s: float = 2.0) -> None:
        self.queues = queues or (Waiting(),)
        models = [GateModel(f"m@{n}", queue) for n, queue in enumerate(self.queues, 1)]
        routes = {"/embed": models, "/of/{name}": models, "/none": []}
        self.paths, self.limits = Paths(routes), WaitLimits(max_wait_s)
        self.starts = StartQueue(LOOP_CLOCK)
        self.gate = self.gate_of(routes)

    def gate_of(self, routes: dict[str, list[GateModel]]) -> Gate:
        return Gate(routes, self.limits, self.starts, Returns())

    async def ask(self, size: int | str = 100, **given: Any) -> ServiceError | None:
        return await self.passes(content_length=str(size), **given)

    async def passes(
        self, path: str = "/embed", client: str = "a", connection: Any = None, **headers: str
    ) -> ServiceError | None:
        """Return the refusal of a request, after the time for which it is held, or None."""
        sent = {"path": path, "method": "POST", "client": (client, 1), "headers": pairs(headers)}
        request: ServedRequest = CALLERS.record(sent, self.paths.route(path))
        self.record, request.connection = request, connection
        try:
            await self.gate.pass_through(request)
        except Overloaded as error:
            began = LOOP_CLOCK.monotonic()
            await self.gate.refused(request, error)
            self.held_s = LOOP_CLOCK.monotonic() - began
            return error
        except ShuttingDown as error:
            return error
        return None

    async def told_s(self, **given: Any) -> float:
        """Return after which time a refused request may come back."""
        error = await self.ask(**given)
        return error.retry_after_s

    def answered(self, size: int, tokens: int, texts: int = 1, **headers: str) -> None:
        """Learn from an answer to a request of so many bytes."""
        sent = {"path": "/embed", "method": "POST", "client": None}
        headers["content_length"] = str(size)
        request = CALLERS.record({**sent, "headers": pairs(headers)}, "/embed")
        request.texts, request.tokens = texts, tokens
        self.gate.answered(request)


async def test_a_queue_is_asked_once_for_a_base_and_its_adapters() -> None:
    base, adapter, other = Waiting(3.0), Waiting(3.0), Waiting(3.0)
    folder = Path("base")
    models = [GateModel("m@1", base, folder), GateModel("a@1", adapter, folder)]
    gated = Gated()
    gated.gate = gated.gate_of({"/embed": [*models, GateModel("m@2", other, Path("other"))]})
    assert await gated.ask() is not None
    assert (len(base.asked), len(adapter.asked), len(other.asked)) == (1, 0, 1)
    assert gated.record.model == "m@1"


async def test_a_wait_up_to_the_limit_is_admitted() -> None:
    gated = Gated(queue := Waiting(2.0))
    assert await gated.ask() is None
    assert gated.record.model == "", "the handler chooses"
    assert queue.asked == [("a", LineKey(0, 0), 21, 0)]
    queue.seconds = 2.1
    error = await gated.ask()
    assert error.reason is Rejection.WAIT
    assert error.retry_after_s == pytest.approx(0.1)
    assert await Gated(Waiting(10.0), max_wait_s=0).ask() is None, "0 is no limit"
    assert await Gated(Waiting(9.0), Waiting(1.0)).ask() is None, "the shortest wait counts"
    gated = Gated(Waiting(9.0), Waiting(8.0))
    assert str(await gated.ask()).startswith("the request would wait about 8 s")
    assert gated.record.model == "m@2", "which the metrics and the log have"


async def test_answers_say_how_many_bytes_a_token_has() -> None:
    """A passage of 102 tokens and 765 bytes is of another class of size at 5 bytes per token."""
    gated = Gated(queue := Waiting())
    await gated.ask(765)
    gated.answered(765, 102)
    await gated.ask(765)
    await gated.ask(765, path="/of/x")
    assert [tokens for _, _, tokens, _ in queue.asked] == [154, 103, 154], "by route"
    for _ in range(200):
        gated.answered(400, 100)
    await gated.ask(400)
    assert queue.asked[-1][2] == pytest.approx(101, abs=1), "later answers say more"


@pytest.mark.parametrize(
    ("size", "tokens", "headers", "expected"),
    [
        (1600, 0, {}, 321),
        (0, 9, {}, 321),
        (100, 5000, {"content_encoding": "gzip"}, 321),
        (100, 5000, {"texts": 0}, 321),  # it has no result
        (100, 5000, {}, 801),  # 2 bytes per token at least
        (1600, 1, {}, 101),  # 16 bytes at most
    ],
)
async def test_odd_answers_say_little(
    size: int, tokens: int, headers: dict[str, Any], expected: int
) -> None:
    """Else a client of compressed or odd bodies would let those of others look long or short."""
    gated = Gated(queue := Waiting())
    gated.answered(size, tokens, **headers)
    await gated.ask(1600)
    assert queue.asked[0][2] == expected


async def test_those_that_come_back_find_the_room_that_they_need() -> None:
    gated, connection = Gated(queue := Waiting(5.0)), Open()
    assert [await gated.told_s(connection=one) for one in (connection, Open())] == [3.0, 3.5]
    queue.seconds = 1.25
    assert str(await gated.ask(connection=Open())) == ("requests that were refused before go first")
    assert await gated.ask(client="b") is None, "another client's line is not full"
    queue.seconds = 1.0
    assert await gated.ask(connection=Open()) is None, "two need a second"
    queue.seconds = 2.0
    await asyncio.sleep(3.0)
    assert await gated.ask(connection=Open()) is not None, "the second one is still to come"
    assert await gated.ask(connection=connection) is None
    await asyncio.sleep(1.0)
    assert await gated.ask(connection=Open()) is None, "nobody is due any more"


async def test_refusals_behind_the_door_are_spread_and_held_too() -> None:
    gated = Gated(Waiting(0.0))

    async def told(connection: Open) -> tuple[float, float]:
        assert await gated.ask(connection=connection) is None
        error, began = (Overloaded("full", 2.0, Rejection.QUEUE_FULL, 0.25), LOOP_CLOCK.monotonic())
        await gated.gate.refused(gated.record, error)
        return error.retry_after_s, LOOP_CLOCK.monotonic() - began

    first, second = Open(), Open()
    assert await told(first) == (pytest.approx(2.0), 0.0)
    assert await told(second) == (pytest.approx(2.25), 0.0)
    told_s, held_s = await told(first)
    assert held_s == pytest.approx(0.25)
    assert told_s <= 2.0


async def test_what_it_is_told_is_true_when_its_late_answer_arrives() -> None:
    gated, connection = Gated(Waiting(2.3)), Open()
    assert await gated.told_s(connection=connection) == pytest.approx(0.3)
    await asyncio.sleep(0.1)
    assert await gated.told_s(connection=connection) == pytest.approx(0.05)
    assert gated.held_s == pytest.approx(0.25), "0.4 s after the first refusal"


async def test_a_server_that_drains_refuses_all() -> None:
    """A client that gets 429 would come back to this replica."""
    gated = Gated(first := Waiting(9.0), Waiting(9.0))
    assert isinstance(await gated.ask(), Overloaded)
    gated.starts.is_closed = True
    assert isinstance(await gated.ask(), ShuttingDown)
    first.seconds = 0.0
    assert isinstance(await gated.ask(), ShuttingDown)


@pytest.mark.parametrize(
    ("size", "tokens"),
    [(0, 1), (4, 1), (5, 2), (100, 21), ("x", 1), ("-5", 1), ("1" * 21, 1),
     ("1" * 20, 1 + int("1" * 20) // 5)],
)  # fmt: skip
async def test_the_tokens_of_a_body_are_a_fifth_of_its_bytes(size: int | str, tokens: int) -> None:
    gated = Gated(queue := Waiting())
    assert await gated.ask(size) is None
    assert queue.asked[0][2] == pytest.approx(tokens, rel=1e-15)
    assert await gated.passes() is None
    assert queue.asked[1][2] == 1


async def test_the_time_limit_of_a_request() -> None:
    gated = Gated(queue := Waiting(3.0))
    # It ends after 3.5 s, and may take half of its time.
    assert await gated.ask(x_request_timeout_ms="7100") is None
    assert queue.asked[-1][1] == LineKey(0, 4)
    assert await gated.ask(x_request_timeout_ms="6900") is not None
    asked = len(queue.asked)
    assert await gated.ask(x_request_timeout_ms="60001") is None, "the handler says why"
    assert len(queue.asked) == asked
    assert gated.record.terms_problem.startswith("x-request-timeout-ms: a whole number from 1")


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Starting:
    """Requests that wait for their turn, and those that have started."""

    def __init__(self, clock: Clock = LOOP_CLOCK) -> None:
        self.starts, self.started = StartQueue(clock), list[str]()

    def ask(self, client: str, count: int = 1, tokens: int = 1) -> list[asyncio.Task[None]]:
        async def wait() -> None:
            await self.starts.wait(client, LineKey(0, 0), tokens)
            self.started.append(client)

        return [asyncio.create_task(wait()) for _ in range(count)]


async def test_a_few_start_per_turn_and_clients_take_turns() -> None:
    starting = Starting()
    starting.ask("heavy", 40)
    await turns(1)
    assert 0 < len(starting.started) < 10
    starting.ask("light")
    starting.ask("other")
    await turns(1)
    before = len(starting.started)
    await turns(2)
    assert {"light", "other"} <= set(starting.started[before - 8 : before + 8])
    assert len(starting.started) < 20, "they are not behind the others"
    await turns(20)
    assert len(starting.started) == 42
    starting.ask("heavy")
    await turns(1)
    assert len(starting.started) == 43, "the line is empty"


NO_WAIT = ExpectedWait(0.0, 0.0)


async def test_what_waits_counts_until_it_starts_or_ends() -> None:
    starting = Starting()
    starts, key = starting.starts, LineKey(0, 0)
    tasks = starting.ask("a", 24, tokens=10) + starting.ask("b", tokens=5)
    await turns(1)
    waiting = starts.with_start(NO_WAIT, "a").requests
    assert 14 <= waiting < 24
    assert starts.unsubmitted["a", key] == 10 * waiting
    assert starts.unsubmitted["b", key] == 5
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert not starts.unsubmitted
    await turns(40)
    assert starts.waiting == 0
    await asyncio.gather(*starting.ask("c", 9))
    assert starting.started[-9:] == ["c"] * 9
    assert starts.with_start(NO_WAIT, "c").requests == 0
    assert not starts.unsubmitted


async def test_requests_that_wait_to_start_count_for_those_that_come() -> None:
    gated = Gated(queue := Waiting())
    tasks = [asyncio.create_task(gated.ask(client=client)) for client in "aaaaaaaaaaab"]
    await turns(1)
    assert [asked[3] for asked in queue.asked[:4]] == [0, 0, 0, 0]
    assert [asked[3] for asked in queue.asked[-3:]] == [21 * 5, 21 * 6, 0], "its own"
    await asyncio.gather(*tasks)
    await gated.ask()
    assert queue.asked[-1][3] == 0


async def test_the_wait_to_start_is_part_of_the_expected_wait() -> None:
    """If four requests take 0.4 s, a client waits for that, and another one for less."""
    starting = Starting(clock := VirtualClock())
    starting.ask("heavy", 100)
    await turns(1)
    assert starting.starts.with_start(NO_WAIT, "heavy").seconds == 0.0, "nothing is measured yet"
    for _ in range(8):
        clock.now += 0.4
        await turns(1)
    left = 100 - len(starting.started)
    assert left > 50
    assert starting.starts.with_start(NO_WAIT, "heavy").seconds == pytest.approx(left / 10, rel=0.2)
    assert starting.starts.with_start(NO_WAIT, "light").seconds == pytest.approx(2 / 10, rel=0.2)
    clock.now += 10.0
    assert starting.starts.with_start(NO_WAIT, "heavy").seconds == 0.0, "the rate is too old"


class App:
    """An application behind a door, and the answers to its requests."""

    def __init__(
        self, queue: Waiting, access: Access = OPEN, origins: tuple[str, ...] = ()
    ) -> None:
        self.handled: list[str] = []
        self.gate = Gated(queue).gate
        route = Route(
            "POST", "/embed", self.handle, RouteDoc("embed", "test", None, None),
            [GateModel("m@1", queue)],
        )  # fmt: skip
        self.app = create_app([route], access, self.gate, self.respond, origins)

    async def handle(self, request: Request) -> Response:
        self.handled.append(request.scope["path"])
        if request.headers.get("fails"):
            raise Overloaded("full", 1.0)
        return PlainTextResponse("ok")

    async def respond(self, request: Request, error: Exception) -> Response:
        info = describe_error(request, error)
        return PlainTextResponse(info.message, info.status, info.headers)

    async def ask(
        self, path: str = "/embed", method: str = "POST", **headers: str
    ) -> tuple[int, dict[str, str]]:
        sent: list[Message] = []
        scope = {"path": path, "method": method, "client": ("a", 1), "headers": pairs(headers)}

        async def receive() -> Message:
            raise AssertionError("the body of a refused request is not read")

        async def send(message: Message) -> None:
            sent.append(message)

        asgi = scope_of(CALLERS.record(scope, path)) | {"query_string": b"", "root_path": ""}
        await self.app({**asgi, "client": ("a", 1)}, receive, send)
        return sent[0]["status"], {n.decode(): v.decode() for n, v in sent[0]["headers"]}


async def test_a_refusal_has_the_headers_of_an_answer_for_an_allowed_origin() -> None:
    app = App(Waiting(9.0), origins=("https://page.example",))
    status, headers = await app.ask(origin="https://page.example")
    assert (status, headers["retry-after"], headers["retry-after-ms"]) == (429, "7", "7000")
    assert headers["access-control-allow-origin"] == "https://page.example"
    assert "retry-after" in headers["access-control-expose-headers"].lower()
    _, others = await app.ask(origin="https://other.example")
    assert "access-control-allow-origin" not in others
    assert not app.handled


async def test_those_without_a_key_are_refused_first() -> None:
    status, headers = await App(queue := Waiting(9.0), access=CLOSED).ask()
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert not queue.asked


async def test_the_door_calls_handlers_and_writes_their_errors() -> None:
    app = App(Waiting(0.0))
    assert (await app.ask())[0] == 200
    assert (await app.ask(fails="yes"))[0] == 429
    assert (await app.ask("/embed", "GET"))[0] == 405, "the router answers"
    assert (await app.ask("/other"))[0] == 404
    assert app.handled == ["/embed", "/embed"]
