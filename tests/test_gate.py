"""The gate and its promises: who is refused before the body, and who comes back as told."""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cloze.service.batching import admission as module
from cloze.service.batching.admission import PromiseKey, Promises
from cloze.service.batching.scheduler import Scheduler
from cloze.service.core import InvalidRequest, ServiceError
from cloze.service.http.gate import Gate, GateModel, Starts
from cloze.service.http.memory_limit import UnreadAnswers
from cloze.service.http.record import RequestRecord, timeout_s
from cloze.service.http.routes import Recorder
from cloze.service.logs import AccessLog
from cloze.service.metrics import Metrics
from tests.encodings import submit
from tests.records import recorded
from tests.test_admission import Steady, measured
from tests.test_scheduler import later, sized

LINE = PromiseKey("m@1", "a", 0)


def error_bytes(_: str, error: ServiceError) -> bytes:
    return json.dumps({"error": str(error)}).encode()


@contextmanager
def gate(max_wait_s: float) -> Iterator[tuple[Gate, Scheduler, Steady]]:
    """A gate before a scheduler of 1,000 tokens per second, whose engine waits."""
    with measured(max_wait_s=max_wait_s) as (scheduler, engine):
        log = AccessLog("text", logging.CRITICAL, 0.0, frozenset())
        recorder = Recorder(Metrics(["m@1"]), log, None, UnreadAnswers(1), None)  # type: ignore[arg-type]
        routes = {"/embed": [GateModel("m@1", scheduler)]}
        gated = Gate(routes, error_bytes, max_wait_s, Starts(), Promises(), recorder)
        yield gated, scheduler, engine


def request(size: int = 50, client: str = "a", **headers: str) -> RequestRecord:
    return recorded(client=client, content_length=str(size), **headers)


def test_a_full_server_that_drains_lets_the_handler_say_so() -> None:
    """A client that gets 429 would come back to this replica; the handler answers 503."""
    with gate(max_wait_s=0.1) as (gated, scheduler, _):
        submit(scheduler, [sized(10)] * 12, later(), client="a")
        first_try = {"x_stainless_retry_count": "0"}  # one that no promise admits
        refusal = gated.refusal(request(**first_try))
        assert refusal is not None
        assert refusal.startswith(b"HTTP/1.1 429")
        scheduler.drain()
        assert gated.refusal(request(**first_try)) is None


def test_the_gate_judges_a_request_by_its_own_line() -> None:
    with gate(max_wait_s=0.1) as (gated, scheduler, _):
        submit(scheduler, [sized(10)] * 12, later(), client="a")
        assert gated.refusal(request()) is not None
        for passing in (
            request(client="b"),
            request(size=5000),
            request(x_request_timeout_ms="10000"),
            request(x_stainless_read_timeout="600"),
            request(x_request_timeout_ms="soon"),  # the handler says why
        ):
            assert gated.refusal(passing) is None
        submit(scheduler, [sized(10)] * 12, later(5), client="a", timeout_s=5)
        assert gated.refusal(request(x_request_timeout_ms="5000")) is None
        stated = request(x_request_timeout_ms="4000")
        submit(scheduler, [sized(10)] * 250, later(90), client="c", timeout_s=90)
        assert gated.refusal(stated) is None


def test_what_has_passed_counts_until_it_is_submitted() -> None:
    with gate(max_wait_s=0.1) as (gated, scheduler, _):
        submit(scheduler, [sized(10)], later(), client="a")
        starts = gated._starts

        async def play() -> None:
            passed = []
            for each in (request() for _ in range(40)):
                if gated.refusal(each) is None:
                    starts.start(each, lambda: None)
                    passed.append(each)
            assert 5 <= len(passed) < 40
            for each in passed:
                starts.begun(each)
            assert not starts.unsubmitted

        asyncio.run(play())


def test_a_refusal_promises_a_time_and_keeps_it() -> None:
    with gate(max_wait_s=0.1) as (gated, scheduler, engine):
        for _ in range(2):  # before the next look at the wait, so that both are admitted
            submit(scheduler, [sized(10)] * 5, later(), client="a")
        submit(scheduler, [sized(10)] * 8, later(), client="a", returning=True)
        refusals = [gated.refusal(request()) for _ in range(3)]
        told = [int(dict(_headers(refusal))["retry-after-ms"]) for refusal in refusals if refusal]
        assert told == sorted(told)
        assert len(set(told)) == 3, "each one has a time of its own"
        early = request()
        assert gated.refusal(early) is not None, "it comes before its time"
        deadline = time.monotonic() + told[0] / 1000
        while time.monotonic() < deadline:
            pass
        first = request(x_stainless_retry_count="0")
        assert gated.refusal(first) is not None, "it says that it does not come back"
        back = request(x_stainless_retry_count="1")
        assert gated.refusal(back) is None
        assert back.is_returning
        engine.gate.set()


def _headers(answer: bytes) -> Iterator[tuple[str, str]]:
    for line in answer.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]:
        name, _, value = line.partition(b": ")
        yield name.decode(), value.decode()


def test_promises_follow_one_another_at_the_rate_of_the_line() -> None:
    promises = Promises()
    assert [promises.promise(LINE, 10.0, 2.0, 0.5) for _ in range(3)] == [2.0, 2.5, 3.0]
    assert promises.promise(LINE._replace(client="b"), 10.0, 2.0, 0.5) == 2.0, "others have lines"
    assert not promises.redeem(LINE, 11.9)
    assert promises.redeem(LINE, 12.0)
    assert not promises.redeem(LINE, 12.1), "the next time is 12.5"
    assert promises.redeem(LINE, 12.6)
    assert promises.outstanding(LINE, 13.0)
    assert not promises.outstanding(LINE, 13.0 + module._LATE_S + 0.1), "nobody came"
    assert not promises.redeem(LINE, 17.0)


def test_promises_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client takes the room of others, and nobody is promised more than a minute."""
    monkeypatch.setattr(module, "_MOST_PROMISES", 100)
    promises = Promises()
    for _ in range(1000):
        assert promises.promise(LINE, 0.0, 1.0, 0.001) <= 3
    assert len(promises) == 50
    other = LINE._replace(client="b")
    for _ in range(1000):
        promises.promise(other, 0.0, 1.0, 0.001)
    assert len(promises) == 75
    assert promises.redeem(other, 1.0)
    assert promises.promise(other, 0.0, 1000.0, 1.0) == 60.0
    promises.promise(LINE._replace(client="c"), 100.0, 1.0, 1.0)
    assert len(promises) == 1, "old ones are forgotten"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-stainless-read-timeout": "600"}, 300.0),
        ({"x-stainless-read-timeout": "2.5"}, 2.5),
        ({"x-stainless-read-timeout": "600", "x-request-timeout-ms": "1500"}, 1.5),
        ({"x-request-timeout-ms": "1500", "x-stainless-read-timeout": "600"}, 1.5),
        *(
            ({"x-stainless-read-timeout": value}, None)
            for value in ("0", "-1", "nan", "inf", "1e9", "soon", "", "0.0000001", "9" * 40)
        ),
    ],
)
def test_a_client_states_its_patience(headers: dict[str, str], expected: float | None) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert timeout_s(dict(pairs), 300.0) == expected


def test_a_wrong_time_limit_of_ours_is_an_error() -> None:
    headers = [(b"x-stainless-read-timeout", b"5"), (b"x-request-timeout-ms", b"x")]
    with pytest.raises(InvalidRequest):
        timeout_s(dict(headers), 300.0)
