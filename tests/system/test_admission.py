"""Admission by time: who is admitted, who is refused at once, and each client's fair share."""

import re
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.faulty import FAULTY, at_once, embed, metric, one_process, wait_for_run
from tests.support.refusals import error_of
from tests.support.serving import Server, running_server
from tests.support.waiting import wait_until

SLOW = {"CLOZE_WORKERS": "1", "CLOZE_MAX_BATCH_TOKENS": "1", "CLOZE_MAX_QUEUE_WAIT_MS": "250"}
"""With the word moon, a text takes 0.15 s, so the third one would wait too long."""


FILLING = 400
"""Texts that fill a server: a minute of work, longer than a test needs on a slow machine."""

AT_ONCE = 20
"""Requests that are sent together; the event loop of a slow machine refuses what waits for it."""


@contextmanager
def full_server(store: Path, **environment: str) -> Iterator[Server]:
    """A server that refuses, because of texts that would run for the next minute."""
    environment = {**SLOW, "CLOZE_REQUEST_TIMEOUT_MS": "600000", **environment}
    body = b'{"inputs": "moon"}'
    head = b"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    with (
        tempfile.NamedTemporaryFile() as hold,
        one_process(store, **environment, HOLD_THE_RIVER=hold.name) as server,
        ExitStack() as clients,
    ):
        host, port = server.url.removeprefix("http://").split(":")

        def send(request: bytes) -> None:
            client = clients.enter_context(socket.create_connection((host, int(port))))
            client.sendall(request)

        # Before the end of the first run, no rate is known, and every request is admitted.
        send((head + body).replace(b'"moon"', b'"river"').replace(b"18", b"19"))
        wait_for_run(server, "river")
        queued = r'cloze_queue_tokens\{model="bert",version="1"\}'
        for count in range(1, FILLING + 1):
            send(head + body)
            if count % AT_ONCE == 0:
                wait_until(lambda count=count: metric(server, queued) >= 3 * count)
        hold.close()
        wait_for_run(server, "moon")
        yield server


@pytest.fixture(scope="module")
def full(tiny_store: Path) -> Iterator[Server]:
    with full_server(tiny_store, CLOZE_TRUSTED_PROXIES="127.0.0.0/8") as server:
        yield server


def test_a_full_server_refuses_at_once_in_the_protocols_shape(full: Server) -> None:
    refused = embed(full, "walk")
    assert error_of(refused) == (429, "overloaded")
    assert int(refused.headers["retry-after"]) >= 1
    openai = httpx.post(
        f"{full.url}/v1/embeddings",
        json={"input": "walk", "model": "bert"},
        headers={"x-request-id": "mine"},
    )
    assert error_of(openai) == (429, "overloaded")
    assert openai.headers["x-request-id"] == "mine"
    assert httpx.get(f"{full.url}/healthz").status_code == 200
    assert (
        metric(
            full, r'cloze_requests_total\{model="bert",route="/embed",status="429",version="1"\}'
        )
        >= 1
    )
    wait_until(lambda: any("POST /v1/embeddings 429 id=mine" in line for line in full.log))


def exchange(server: Server, *parts: bytes, wait_s: float = 0.5) -> bytes:
    """Send bytes in parts on one connection; return what comes until nothing does for so long."""
    host, port = server.url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        for part in parts:
            connection.sendall(part)
            try:
                while data := connection.recv(65536):
                    received += data
            except TimeoutError:
                pass
    return received


def test_a_refusal_comes_before_the_body_and_keeps_the_connection(full: Server) -> None:
    head = b"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: 20\r\n\r\n"
    health = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answers = exchange(full, head, b"no json, and ", b"slowly." + health)
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"429", b"200"]
    templated = head.replace(b"/embed", b"/v2/models/bert.embed/infer")
    answers = exchange(full, templated, b"no json, and ", b"slowly.")
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"429"]
    assert b'{"error":"the request would wait' in answers
    hesitant = head.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n")
    answers = exchange(full, hesitant)
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"429"]
    assert b"connection: close" in answers
    last = head.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + b" " * 20
    answers = exchange(full, last)
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"429"]
    assert not any("is not HTTP/1.1" in line for line in full.log)
    both = exchange(full, (head + b" " * 20) * 3, wait_s=2.0)
    assert re.findall(rb"HTTP/1.1 (\d+)", both) == [b"429"] * 3


def test_a_client_behind_a_trusted_proxy_has_its_own_share(full: Server) -> None:
    assert embed(full, "walk").status_code == 429
    other = {"x-forwarded-for": "203.0.113.9"}

    def answered() -> bool:
        body = {"inputs": "walk"}
        return httpx.post(f"{full.url}/embed", json=body, headers=other).status_code == 200

    wait_until(answered)
    assert embed(full, "walk").status_code == 429


def test_a_request_may_state_its_time_limit(tiny_store: Path) -> None:
    with running_server(tiny_store, "--model", "bert", command=FAULTY) as server:
        started = time.monotonic()
        headers = {"x-request-timeout-ms": "300"}
        answer = httpx.post(f"{server.url}/embed", json={"inputs": "river"}, headers=headers)
        assert error_of(answer) == (504, "timeout")
        assert 0.25 < time.monotonic() - started < 2.5
        wait_for_run(server, "river")
        assert embed(server, "walk").status_code == 200


def test_nothing_is_silently_late_when_the_workers_become_slower(tiny_store: Path) -> None:
    """Short runs have measured a high rate. Then all runs last for 0.15 s."""
    few = {"CLOZE_WORKERS": "1", "CLOZE_MAX_BATCH_TOKENS": "1"}
    starting = running_server(tiny_store, "--model", "bert", command=FAULTY, **few)
    with starting as server, ThreadPoolExecutor(40) as pool, httpx.Client(timeout=30) as client:
        for _ in range(5):
            assert embed(server, "walk").status_code == 200

        def ask(_: int) -> tuple[int, float]:
            started = time.monotonic()
            stated = {"x-request-timeout-ms": "2000"}
            body = {"inputs": "moon"}
            answer = client.post(f"{server.url}/embed", json=body, headers=stated)
            return answer.status_code, time.monotonic() - started

        answers = list(pool.map(ask, range(40)))
    statuses = [status for status, _ in answers]
    assert set(statuses) <= {200, 429, 504}
    assert statuses.count(200) >= 4
    assert 504 in statuses, "they were accepted at the old rate"
    assert max(seconds for _, seconds in answers) < 4.0


def test_requests_at_once_are_counted_before_they_are_submitted(tiny_store: Path) -> None:
    """Hundreds of requests in one turn of the event loop do not all pass the gate."""
    with running_server(tiny_store, "--model", "bert", command=FAULTY, **SLOW) as server:
        for length in range(1, 4):
            assert embed(server, "moon " * length).status_code == 200
        statuses = [answer.status_code for answer in at_once(server, ["moon"] * 40)]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) <= 8
