"""Which requests the gate refuses before their bodies, and what it says to them."""

import asyncio
import logging
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from cloze.service.batching.admission import WaitLimits
from cloze.service.core import (
    BatchResult,
    ExpectedWait,
    Overloaded,
    QueueState,
    Rejection,
    ServiceError,
    Timings,
)
from cloze.service.http import gate as gate_module
from cloze.service.http import record as record_module
from cloze.service.http.gate import Gate, GateModel, Paths, Starts
from cloze.service.http.memory_limit import UnreadAnswers
from cloze.service.http.record import Callers, RequestRecord
from cloze.service.http.returns import Returns
from cloze.service.http.routes import Recorder
from cloze.service.observe.logs import AccessLog, RequestCost
from cloze.service.observe.metrics import Metrics
from tests.records import Open, connected, pairs


class Waiting:
    """A queue whose expected wait a test sets, and that records what it is asked."""

    state = QueueState(0, 0.0)
    dead: str | None = None

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.draining = seconds, False
        self.asked: list[tuple[str, int, float | None, int]] = []

    def expected_wait(
        self,
        client: str,
        tokens: int,
        timeout_s: float | None,
        unsubmitted: int = 0,
        is_bulk: bool = False,
    ) -> ExpectedWait:
        self.asked.append((client, tokens, timeout_s, unsubmitted))
        return ExpectedWait(self.seconds, 0.5)

    def submit(self, *_: Any, **__: Any) -> Future[BatchResult]:
        raise NotImplementedError

    def drain(self) -> None:
        self.draining = True

    def close(self, timeout_s: float = 5.0) -> None:
        raise NotImplementedError


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (gate_module, record_module):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Lines:
    """A writer of the access log that keeps what it gets."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.lines.append(line)

    def flush(self, wait_s: float) -> None:
        pass


class Gated:
    """A gate before queues; the first one is the default's."""

    def __init__(self, *queues: Waiting, max_wait_s: float = 2.0) -> None:
        self.queues = queues or (Waiting(),)
        models = [GateModel(f"m@{n}", queue) for n, queue in enumerate(self.queues, 1)]
        self.metrics, self.returns, self.written = Metrics(["m@1"]), Returns(), Lines()
        self.starts = Starts()
        self.log = AccessLog("json", logging.INFO, 1.0, frozenset(), self.written)  # type: ignore[arg-type]
        routes = {"/embed": models, "/of/{name}": models, "/none": []}
        self.paths = Paths(routes)
        self.limits = WaitLimits(max_wait_s)
        self.gate = self.gate_of(routes)

    def gate_of(self, routes: dict[str, list[GateModel]]) -> Gate:
        recorder = Recorder(self.metrics, self.log, None, UnreadAnswers(1), None)  # type: ignore[arg-type]
        return Gate(routes, self._error, self.limits, self.starts, self.returns, recorder)

    @staticmethod
    def _error(path: str, error: ServiceError) -> bytes:
        return f"{path}: {error}".encode()

    def ask(self, size: int | str = 100, path: str = "/embed", **given: Any) -> bytes | None:
        return self.refusal(path, content_length=str(size), **given)

    def refusal(
        self, path: str, client: str = "a", connection: Open | None = None, **headers: str
    ) -> bytes | None:
        sent = {"path": path, "method": "POST", "client": (client, 1), "headers": pairs(headers)}
        self.record: RequestRecord = CALLERS.record(sent, self.paths.route(path))
        self.record.connection = connection
        refusal = self.gate.refusal(self.record)
        self.hold_s = refusal.hold_s if refusal is not None else 0.0
        return refusal.answer if refusal is not None else None

    @property
    def is_admitted(self) -> bool:
        return self.record.unstarted is not None


CALLERS = Callers(max_timeout_s=60.0)


def parts(answer: bytes | None) -> tuple[dict[str, str], str]:
    assert answer is not None
    head, body = answer.decode().split("\r\n\r\n")
    first, *lines = head.split("\r\n")
    assert first == "HTTP/1.1 429 Too Many Requests"
    return dict(line.split(": ") for line in lines), body


def test_a_queue_is_asked_once_for_a_base_and_its_adapters(clock: Clock) -> None:
    base, adapter, other = Waiting(3.0), Waiting(3.0), Waiting(3.0)
    folder = Path("base")
    models = [GateModel("m@1", base, folder), GateModel("a@1", adapter, folder)]
    gated = Gated()
    gated.gate = gated.gate_of({"/embed": [*models, GateModel("m@2", other, Path("other"))]})
    assert gated.ask() is not None
    assert (len(base.asked), len(adapter.asked), len(other.asked)) == (1, 0, 1)
    assert gated.record.model == "m@1"


def test_a_wait_up_to_the_limit_is_admitted(clock: Clock) -> None:
    queue = Waiting(2.0)
    gated = Gated(queue)
    assert gated.ask() is None
    assert gated.is_admitted
    assert queue.asked == [("a", 21, None, 0)]
    queue.seconds = 2.1
    assert gated.ask() is not None
    assert not gated.is_admitted
    assert Gated(Waiting(10.0), max_wait_s=0).ask() is None, "0 is no limit"


def test_answers_say_how_many_bytes_a_token_has(clock: Clock) -> None:
    """A passage of 102 tokens and 765 bytes is of another class of size at 5 bytes per token."""
    queue = Waiting(0.0)
    gated = Gated(queue)
    assert gated.ask(765) is None
    gated.record.cost = RequestCost(1, 102, Timings(0.0, 0.0, 0.0, 0.0))
    gated.gate.answered(gated.record)
    gated.ask(765)
    gated.ask(765, path="/of/x")
    assert [tokens for _, tokens, *_ in queue.asked] == [154, 103, 154], "by route"


def test_an_answer_without_tokens_or_from_a_cut_text_says_little(clock: Clock) -> None:
    queue = Waiting(0.0)
    gated = Gated(queue)
    gated.ask(1600)
    for cost in (None, RequestCost(1, 0, Timings(0.0, 0.0, 0.0, 0.0))):
        gated.record.cost = cost
        gated.gate.answered(gated.record)
    gated.ask(1600)
    gated.record.cost = RequestCost(1, 1, Timings(0.0, 0.0, 0.0, 0.0), truncated=1)
    gated.gate.answered(gated.record)
    gated.ask(1600)
    assert [tokens for _, tokens, *_ in queue.asked] == [321, 321, 101], "16 bytes at most"


def test_no_answer_says_that_a_token_has_less_than_two_bytes(clock: Clock) -> None:
    """Else a client of compressed or odd bodies would let those of others look long."""
    queue = Waiting(0.0)
    gated = Gated(queue)
    gated.ask(100, content_encoding="gzip")
    gated.record.cost = RequestCost(1, 5000, Timings(0.0, 0.0, 0.0, 0.0))
    gated.gate.answered(gated.record)
    gated.ask(100)
    gated.record.cost = RequestCost(1, 5000, Timings(0.0, 0.0, 0.0, 0.0))
    gated.gate.answered(gated.record)
    gated.ask(100)
    assert [tokens for _, tokens, *_ in queue.asked] == [21, 21, 51]


def test_a_refusal_says_why_and_when_to_come_back(clock: Clock) -> None:
    gated = Gated(Waiting(3.25))
    headers, body = parts(gated.ask(x_request_id="mine"))
    assert body == (
        "/embed: the request would wait about 3.3 s; CLOZE_MAX_QUEUE_WAIT_MS allows 2 s"
    )
    assert headers == {
        "content-type": "application/json", "content-length": str(len(body)), "retry-after": "2",
        "retry-after-ms": "1250", "x-request-id": "mine",
    }  # fmt: skip
    headers, _ = parts(gated.ask())
    assert len(headers["x-request-id"]) == 16
    assert headers["retry-after-ms"] == "1750", "half a second after the first one"
    _, body = parts(gated.ask(path="/of/x"))
    assert body.startswith("/of/{name}: ")


def test_refusals_are_counted_and_logged(clock: Clock) -> None:
    gated = Gated(Waiting(9.0))
    assert gated.ask(x_request_id="mine") is not None
    gated.log.flush(0)
    [line] = gated.written.lines
    for part in ('"route":"/embed"', '"status":429', '"id":"mine"', '"model":"m@1"', '"POST"',
                 '"error":"Overloaded"'):  # fmt: skip
        assert part in line
    text = gated.metrics.exposition("")[0].decode()
    series = [line for line in text.splitlines() if line.endswith(" 1.0") and "cloze" in line]
    assert any('reason="wait"' in line for line in series)
    assert any('status="429"' in line and 'route="/embed"' in line for line in series)


def test_half_of_the_wait_is_kept_for_those_that_come_back(clock: Clock) -> None:
    queue, connection = Waiting(5.0), Open()
    gated = Gated(queue)
    headers, _ = parts(gated.ask(connection=connection))
    assert headers["retry-after-ms"] == "3000"
    queue.seconds = 1.75
    _, body = parts(gated.ask(connection=Open()))
    assert body == "/embed: requests that were refused before go first"
    assert gated.ask(client="b") is None, "another client's line is not full"
    queue.seconds = 1.0
    assert gated.ask(connection=Open()) is None, "half of the wait"
    queue.seconds = 2.0
    clock.now += 3.0
    assert gated.ask(connection=Open()) is not None, "the second one is still to come back"
    assert gated.ask(connection=connection) is None
    clock.now += 1.0
    assert gated.ask(connection=Open()) is None, "nobody is due any more"


def test_a_connection_that_does_not_wait_gets_its_refusals_late(clock: Clock) -> None:
    queue, connection = Waiting(9.0), Open()
    gated = Gated(queue)
    held = []
    for _ in range(7):
        assert gated.ask(connection=connection) is not None
        held.append(gated.hold_s)
        clock.now += gated.hold_s
    assert held == [0.0, 0.25, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert gated.ask(connection=Open()) is not None
    assert gated.hold_s == 0.0, "another connection does not pay for it"
    clock.now += 60.0
    assert gated.ask(connection=connection) is not None
    assert gated.hold_s == 0.0, "it has waited now"


def test_a_connection_has_one_time_however_often_it_asks(clock: Clock) -> None:
    gated, connection = Gated(Waiting(5.0)), Open()
    for _ in range(20):
        gated.ask(connection=connection)
    headers, _ = parts(gated.ask(connection=Open()))
    assert headers["retry-after-ms"] == "3500", "half a second after the time of the first one"


def test_what_it_is_told_is_true_when_its_late_answer_arrives(clock: Clock) -> None:
    gated, connection = Gated(Waiting(2.3)), Open()
    gated.ask(connection=connection)
    clock.now += 0.1
    headers, _ = parts(gated.ask(connection=connection))
    assert gated.hold_s == 0.25
    assert headers["retry-after-ms"] == "50", "0.4 s after the first refusal"


def test_refusals_after_the_gate_are_spread_and_held_too() -> None:
    gated = Gated(Waiting(0.0))

    async def told(connection: Open) -> float:
        assert gated.ask(connection=connection) is None
        error = Overloaded("full", 2.0, Rejection.QUEUE_FULL, 0.25)
        await gated.gate.spread(gated.record, error)
        return error.retry_after_s

    first, second = Open(), Open()
    assert asyncio.run(told(first)) == pytest.approx(2.0)
    assert asyncio.run(told(second)) == pytest.approx(2.25, abs=0.1)
    started = time.monotonic()
    assert asyncio.run(told(first)) <= 2.0
    assert time.monotonic() - started >= 0.25


def test_a_server_that_drains_lets_the_handler_answer(clock: Clock) -> None:
    first, second = Waiting(9.0), Waiting(9.0)
    gated = Gated(first, second)
    second.drain()
    assert gated.ask() is not None
    first.drain()
    assert gated.ask() is None
    assert gated.is_admitted


def test_the_model_with_the_shortest_wait_counts(clock: Clock) -> None:
    gated = Gated(Waiting(9.0), Waiting(1.0))
    assert gated.ask() is None
    gated = Gated(Waiting(9.0), Waiting(8.0))
    assert parts(gated.ask())[1].startswith("/embed: the request would wait about 8 s")
    gated.log.flush(0)
    assert '"model":"m@2"' in gated.written.lines[0]


def test_requests_that_no_model_answers_pass(clock: Clock) -> None:
    gated = Gated(Waiting(9.0))
    for path in ("/other", "/none", "/of/"):
        assert gated.ask(path=path) is None
        assert not gated.is_admitted
    assert gated.ask(path="/of/x") is not None


@pytest.mark.parametrize(
    ("size", "tokens"),
    [(0, 1), (4, 1), (5, 2), (100, 21), ("x", 1), ("-5", 1), ("1" * 21, 1),
     ("1" * 20, 1 + int("1" * 20) // 5)],
)  # fmt: skip
def test_the_tokens_of_a_body_are_a_fifth_of_its_bytes(
    clock: Clock, size: int | str, tokens: int
) -> None:
    queue = Waiting()
    assert Gated(queue).ask(size) is None
    assert queue.asked[0][1] == pytest.approx(tokens, rel=1e-15)
    gated = Gated(Waiting())
    assert gated.refusal("/embed") is None
    assert gated.queues[0].asked[0][1] == 1


def test_the_time_limit_of_a_request(clock: Clock) -> None:
    queue = Waiting(3.0)
    gated = Gated(queue)
    # It ends after 3.5 s, and may take half of its time.
    assert gated.ask(x_request_timeout_ms="7100") is None
    assert queue.asked[-1][2] == 7.1
    assert gated.ask(x_request_timeout_ms="6900") is not None
    asked = len(queue.asked)
    assert gated.ask(x_request_timeout_ms="60001") is None, "the handler says what is wrong"
    assert len(queue.asked) == asked
    assert gated.is_admitted
    assert gated.record.terms_problem.startswith("x-request-timeout-ms: a whole number from 1 to")


def test_what_has_passed_counts_until_its_handler_begins(clock: Clock) -> None:
    queue = Waiting()
    gated = Gated(queue)

    def started(size: int = 100, client: str = "a") -> RequestRecord:
        assert gated.ask(size, client=client) is None
        gated.starts.start(gated.record, lambda: None)
        return gated.record

    async def run() -> None:
        passed = [started() for _ in range(3)]
        started(client="b")
        started(5)
        assert [asked[3] for asked in queue.asked] == [0, 21, 42, 0, 63]
        gated.starts.begun(passed[0])
        gated.starts.begun(passed[0])
        passed.append(started())
        assert queue.asked[-1][3] == 63 + 2 - 21
        for each in passed[1:]:
            gated.starts.begun(each)
        started()
        assert queue.asked[-1][3] == 2

    asyncio.run(run())


def test_requests_that_wait_to_start_count(clock: Clock) -> None:
    """At 8 starts per second, a new client waits for two turns of clients: a quarter of a second."""
    queue = Waiting(1.75)
    gated = Gated(queue)

    async def run() -> None:
        for _ in range(40):
            gated.starts.start(connected("b"), lambda: None)
        for _ in range(3):
            clock.now += 0.5
            gated.starts._turn()
        assert gated.ask() is None
        queue.seconds = 1.85
        headers, body = parts(gated.ask())
        assert "wait about 2.1 s" in body
        assert headers["retry-after-ms"] == "101", "rounded up"

    asyncio.run(run())
