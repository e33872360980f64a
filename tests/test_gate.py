"""The gate before a scheduler: who is refused before the body."""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cloze.service.batching.admission import WaitLimits
from cloze.service.batching.scheduler import Scheduler
from cloze.service.core import InvalidRequest, ServiceError
from cloze.service.http.gate import Gate, GateModel, Starts
from cloze.service.http.memory_limit import UnreadAnswers
from cloze.service.http.record import RequestRecord, timeout_s
from cloze.service.http.returns import Returns
from cloze.service.http.routes import Recorder
from cloze.service.observe.logs import AccessLog
from cloze.service.observe.metrics import Metrics
from tests.encodings import submit
from tests.records import recorded
from tests.test_admission import Steady, measured
from tests.test_scheduler import later, sized


def error_bytes(_: str, error: ServiceError) -> bytes:
    return json.dumps({"error": str(error)}).encode()


@contextmanager
def gate(max_wait_s: float) -> Iterator[tuple[Gate, Scheduler, Steady]]:
    """A gate before a scheduler of 1,000 tokens per second, whose engine waits."""
    limits = WaitLimits(max_wait_s)
    with measured(waits=limits) as (scheduler, engine):
        log = AccessLog("text", logging.CRITICAL, 0.0, frozenset())
        recorder = Recorder(Metrics(["m@1"]), log, None, UnreadAnswers(1), None)  # type: ignore[arg-type]
        routes = {"/embed": [GateModel("m@1", scheduler)]}
        gated = Gate(routes, error_bytes, limits, Starts(), Returns(), recorder)
        yield gated, scheduler, engine


def request(size: int = 50, client: str = "a", **headers: str) -> RequestRecord:
    return recorded(client=client, content_length=str(size), **headers)


def test_a_full_server_that_drains_lets_the_handler_say_so() -> None:
    """A client that gets 429 would come back to this replica; the handler answers 503."""
    with gate(max_wait_s=0.1) as (gated, scheduler, _):
        submit(scheduler, [sized(10)] * 12, later(), client="a")
        refusal = gated.refusal(request())
        assert refusal is not None
        assert refusal.answer.startswith(b"HTTP/1.1 429")
        scheduler.drain()
        assert gated.refusal(request()) is None


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
