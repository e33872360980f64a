"""Log lines: one per request, as text or JSON, without content, and never in a request's way."""

import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cloze.service.core import Rejection, Timings
from cloze.service.observe.logs import AccessLog, AccessRecord, LineWriter, RequestCost, _line
from tests.serving import Server, running_server
from tests.waiting import wait_until

COST = RequestCost(2, 14, Timings(0.001, 0.002, 0.003))


def record(status: int = 200, route: str = "/embed", error: str = "") -> AccessRecord:
    cost = COST if status == 200 else None
    return AccessRecord(1.5, "abc", "POST", route, "bert@1", status, 0.0071, cost, error)


def requests_in(server: Server) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in server.log]
    return [line for line in lines if line["message"] == "request"]


@pytest.fixture(scope="module", params=[(), ("--frontends", "2")], ids=["one", "front-ends"])
def server(request: pytest.FixtureRequest, tiny_store: Path) -> Iterator[Server]:
    with running_server(tiny_store, *request.param, CLOZE_LOG_FORMAT="json") as running:
        yield running


def ask(server: Server, body: dict[str, Any], request_id: str) -> httpx.Response:
    headers = {"x-request-id": request_id}
    return httpx.post(f"{server.url}/fill-mask", json=body, headers=headers)


def line_of(server: Server, request_id: str) -> dict[str, Any]:
    wait_until(lambda: any(line["id"] == request_id for line in requests_in(server)))
    [line] = [line for line in requests_in(server) if line["id"] == request_id]
    return line


def test_every_request_has_a_line_without_its_content(server: Server) -> None:
    texts = ["the king was [MASK] secretly", "a [MASK]"]
    answer = ask(server, {"inputs": texts, "model": "bert"}, "one-1")
    assert answer.headers["x-model"] == "bert@1"
    line = line_of(server, "one-1")
    assert line["level"] == "info"
    assert (line["method"], line["route"], line["status"]) == ("POST", "/fill-mask", 200)
    assert (line["model"], line["texts"]) == ("bert@1", 2)
    assert line["client"] == "127.0.0.1"
    assert line["tokens"] == int(answer.headers["x-compute-tokens"])
    assert line["ms"].keys() == {"total", "tokenize", "queue", "inference"}
    assert 0 < line["ms"]["inference"] < line["ms"]["total"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])
    assert "secretly" not in "".join(server.log)


def test_texts_are_counted_in_objects_too(server: Server) -> None:
    body = {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}
    headers = {"x-request-id": "six-6"}
    httpx.post(f"{server.url}/similarity", json=body, headers=headers)
    assert line_of(server, "six-6")["texts"] == 3


def test_errors_have_their_kind_and_not_their_message(server: Server) -> None:
    ask(server, {"inputs": "privately nothing to fill"}, "two-2")
    line = line_of(server, "two-2")
    assert (line["level"], line["status"], line["error"]) == ("warning", 422, "InvalidRequest")
    httpx.get(f"{server.url}/privately", headers={"x-request-id": "three-3"})
    assert line_of(server, "three-3")["route"] == "other"
    assert "privately" not in "".join(server.log)


def test_probes_and_scrapes_have_no_line(server: Server) -> None:
    for route in ("/healthz", "/readyz", "/health", "/metrics"):
        assert httpx.get(server.url + route).status_code == 200
    httpx.get(f"{server.url}/info", headers={"x-request-id": "four-4"})
    line_of(server, "four-4")
    routes = {line["route"] for line in requests_in(server)}
    assert routes.isdisjoint({"/healthz", "/readyz", "/health", "/metrics"})


def test_every_line_of_a_busy_server_is_whole(server: Server) -> None:
    with httpx.Client() as client:
        for number in range(300):
            client.post(
                f"{server.url}/embed",
                json={"inputs": "the king"},
                headers={"x-request-id": f"busy-{number}"},
            )
    wait_until(lambda: sum(line["id"].startswith("busy-") for line in requests_in(server)) == 300)


def test_text_lines_have_the_same_fields(tiny_store: Path) -> None:
    with running_server(tiny_store) as running:
        body = {"inputs": ["the king", "a moon"]}
        httpx.post(f"{running.url}/embed", json=body, headers={"x-request-id": "five-5"})
        wait_until(lambda: any("id=five-5" in line for line in running.log))
        [line] = [line for line in running.log if "id=five-5" in line]
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO POST /embed 200 id=five-5 client=127.0.0.1 "
        r"model=bert@1 texts=2 tokens=\d+ total_ms=[\d.]+ tokenize_ms=[\d.]+ queue_ms=[\d.]+ inference_ms=[\d.]+\n",
        line,
    )


def test_a_client_cannot_write_fields_of_a_line() -> None:
    """A proxy may pass on what a client forges, and a keys file may have any names."""
    forged = record()._replace(client="key:a status=200\nb")
    assert " client=key:a?status=200?b " in _line("text", forged)
    assert json.loads(_line("json", forged))["client"] == forged.client


@pytest.mark.parametrize(
    ("level", "share", "records", "expected"),
    [
        ("info", 1.0, [record(), record(422), record(503)], [200, 422, 503]),
        ("info", 0.0, [record(), record(422), record(503)], [422, 503]),
        ("warning", 1.0, [record(), record(422), record(503)], [422, 503]),
        ("error", 1.0, [record(), record(422), record(503)], [503]),
        ("info", 1.0, [record(route="/healthz"), record(503, route="/healthz")], [503]),
        ("debug", 1.0, [record(route="/healthz")], [200]),
    ],
)
def test_levels_and_shares_choose_lines(
    capfd: pytest.CaptureFixture[str],
    level: str,
    share: float,
    records: list[AccessRecord],
    expected: list[int],
) -> None:
    number = logging.getLevelName(level.upper())
    log = AccessLog("json", number, share, frozenset({"/healthz"}))
    for one in records:
        log.add(one)
    log.flush(5)
    lines = capfd.readouterr().err.splitlines()
    assert [json.loads(line)["status"] for line in lines] == expected


def test_a_flood_of_refusals_is_a_few_lines(capfd: pytest.CaptureFixture[str]) -> None:
    """Per second and reason; the next line counts those that were left out."""
    log = AccessLog("json", logging.INFO, 1.0, frozenset())
    flood = [(Rejection.WAIT, 0.0)] * 3000 + [(Rejection.KEY_LIMIT, 0.5)] * 12
    for reason, second in [*flood, (Rejection.WAIT, 1.0), (Rejection.WAIT, 1.1)]:
        log.add(record(429)._replace(time=1e9 + second, rejection=reason, error=reason))
    for _ in range(30):
        log.add(record(503))
    log.flush(5)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    counts = Counter(line["error"] for line in lines if line["status"] == 429)
    assert counts == {"wait": 12, "key_limit": 10}
    assert [line["left_out"] for line in lines if "left_out" in line] == [2990]
    assert sum(line["status"] == 503 for line in lines) == 30, "the server's own errors all"
    assert sum(map(len, map(str, lines))) < 20_000


def test_half_of_the_results_are_sampled(capfd: pytest.CaptureFixture[str]) -> None:
    log = AccessLog("text", logging.INFO, 0.5, frozenset())
    for _ in range(2000):
        log.add(record())
    log.flush(5)
    assert 800 < len(capfd.readouterr().err.splitlines()) < 1200


def test_a_log_that_nobody_reads_blocks_neither_requests_nor_the_end(tiny_store: Path) -> None:
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "cloze", "serve", "--port", "0", "--model-store", str(tiny_store)],
        stderr=write_end,
    )
    try:
        os.close(write_end)
        text = b""
        while b"metrics:" not in text:
            text += os.read(read_end, 4096)
        url = re.search(rb"listening on (\S+)", text)
        assert url
        with httpx.Client(base_url=url[1].decode(), timeout=20) as client:
            for _ in range(1500):  # 200 kB of lines; a pipe holds 64 kB
                assert client.post("/embed", json={"inputs": "a"}).status_code == 200
        process.terminate()
        assert process.wait(25) == 0
    finally:
        process.kill()
        process.wait()
        os.close(read_end)


def test_lines_without_room_are_counted(capfd: pytest.CaptureFixture[str]) -> None:
    writer = LineWriter(most_waiting=2)
    for number in range(5):
        writer.add(f"{number}\n")
    writer.flush(5)
    writer.add("x" * 10_000 + "\n")
    writer.flush(5)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "0",
        "1",
        "3 lines are missing: the log was read too slowly",
        "x" * 10_000,
    ]


def test_a_log_that_cannot_be_written_stops_the_start(tiny_store: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cloze", "serve", "--port", "0", "--model-store", tiny_store],
            stderr=full,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 2
    assert done.stdout == (
        "cloze: the log (standard error) cannot be written: No space left on device\n"
    )
