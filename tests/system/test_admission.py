"""Admission by time, of real servers: stated limits, and many requests at once."""

import time
from pathlib import Path

import httpx

from tests.support.faulty import FAULTY, SLOW_TEXTS, at_once, embed, wait_for_run
from tests.support.refusals import error_of
from tests.support.serving import running_server

SLOW = {"CLOZE_WORKERS": "1", "CLOZE_MAX_BATCH_TOKENS": "1", "CLOZE_MAX_QUEUE_WAIT_MS": "250"}
"""With the word moon, a text takes 0.15 s, so the third one would wait too long."""


def test_a_request_may_state_its_time_limit(tiny_store: Path) -> None:
    with running_server(tiny_store, "--model", "bert", command=FAULTY) as server:
        started = time.monotonic()
        headers = {"x-request-timeout-ms": "300"}
        answer = httpx.post(f"{server.url}/embed", json={"inputs": "river"}, headers=headers)
        assert error_of(answer) == (504, "timeout")
        assert 0.25 < time.monotonic() - started < 2.5
        wait_for_run(server, "river")
        assert embed(server, "walk").status_code == 200


def test_requests_at_once_are_counted_before_they_are_submitted(tiny_store: Path) -> None:
    """Hundreds of requests in one turn of the event loop do not all pass the gate."""
    with running_server(tiny_store, "--model", "bert", command=FAULTY, **SLOW) as server:
        for length in range(1, 4):
            assert embed(server, "moon " * length).status_code == 200
        statuses = [answer.status_code for answer in at_once(server, SLOW_TEXTS[:40])]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) <= 8
