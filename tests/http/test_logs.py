"""Log lines: one per request, as text or JSON, without content, and never in a request's way."""

import fcntl
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cloze.service.core import ServedRequest
from cloze.service.errors import Rejection
from cloze.service.http.record import Callers
from cloze.service.http.routes import CONNECTION
from cloze.service.observe.logs import AccessLog, LineWriter, _line
from tests.support.records import Open
from tests.support.serving import Server, running_server
from tests.support.waiting import wait_until

COST: dict[str, Any] = {
    "texts": 2, "tokens": 14, "tokenize_s": 0.001, "queue_s": 0.002, "inference_s": 0.003
}  # fmt: skip


def record(status: int = 200, route: str = "/embed", error: str = "") -> ServedRequest:
    cost = COST if status == 200 else {}
    return ServedRequest(
        ended=1.5, identity=b"abc", route=route, model="bert@1", status=status, seconds=0.0071,
        error=error, **cost,
    )  # fmt: skip


def requests_in(server: Server) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in server.log]
    return [line for line in lines if line["message"] == "request"]


@pytest.fixture(scope="module")
def server(tiny_store: Path) -> Iterator[Server]:
    proxies = {"CLOZE_TRUSTED_PROXIES": "127.0.0.1/8, 10.0.0.2"}
    arguments = ("--frontends", "2", "--log-format", "json")
    with running_server(tiny_store, *arguments, **proxies) as running:
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


def test_errors_have_their_kind_and_not_their_message(server: Server) -> None:
    ask(server, {"inputs": "privately nothing to fill"}, "two-2")
    line = line_of(server, "two-2")
    assert (line["level"], line["status"], line["error"]) == ("warning", 422, "invalid_value")
    httpx.get(f"{server.url}/privately", headers={"x-request-id": "three-3"})
    assert line_of(server, "three-3")["route"] == "other"
    assert "privately" not in "".join(server.log)


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        ("198.51.100.7, 203.0.113.9", "203.0.113.9"),
        ("198.51.100.7, 203.0.113.8, 10.0.0.2", "203.0.113.8"),
        ("x" * 70, "x" * 64),
    ],
)
def test_the_last_address_that_no_proxy_has_is_the_client(
    server: Server, forwarded: str, client: str
) -> None:
    """Each proxy appends the address that it sees; a client may send any others before them."""
    headers = {"x-forwarded-for": forwarded, "x-request-id": f"of-{client[:12]}"}
    httpx.post(f"{server.url}/embed", json={"inputs": "walk"}, headers=headers)
    assert line_of(server, headers["x-request-id"])["client"] == client


def test_a_proxy_that_is_not_trusted_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    callers = Callers()

    def ask(address: str, header: bytes) -> str:
        scope = {"method": "POST", "path": "/embed", "client": (address, 1)}
        state = {CONNECTION: Open(address)}
        headers = [(header, b"203.0.113.9")]
        return callers.record(scope | {"state": state, "headers": headers}, None).client

    for header, lines in ((b"accept", 0), (b"x-forwarded-for", 1), (b"forwarded", 1)):
        assert ask("10.0.0.1", header) == "10.0.0.1"
        assert len(caplog.messages) == lines
    for number in range(99):
        ask(f"198.51.100.{number}", b"forwarded")
    assert len(caplog.messages) == 8, "a client may pretend"
    assert "CLOZE_TRUSTED_PROXIES" in caplog.messages[0]
    assert "203.0.113.9" not in caplog.text


def test_a_client_cannot_write_fields_of_a_line() -> None:
    """A proxy may pass on what a client forges, and a keys file may have any names."""
    forged = replace(record(), client="key:a status=200\nb")
    assert " client=key:a?status=200?b " in _line("text", forged)
    assert json.loads(_line("json", forged))["client"] == forged.client


def test_a_flood_of_refusals_is_a_few_lines() -> None:
    """Per second and reason; the next line counts those that were left out."""
    writer = LineWriter()
    log = AccessLog("json", logging.INFO, 1.0, frozenset(), writer)
    flood = [(Rejection.WAIT, 0.0)] * 3000 + [(Rejection.KEY_LIMIT, 0.5)] * 12
    for reason, second in [*flood, (Rejection.WAIT, 1.0), (Rejection.WAIT, 1.1)]:
        log.add(replace(record(429), ended=1e9 + second, rejection=reason, error=reason))
    for _ in range(30):
        log.add(record(503))
    lines = [json.loads(_line(*each)) for each in writer.waiting]
    counts = Counter(line["error"] for line in lines if line["status"] == 429)
    assert counts == {"wait": 12, "key_limit": 10}
    assert [line["left_out"] for line in lines if "left_out" in line] == [2990]
    assert sum(line["status"] == 503 for line in lines) == 30, "the server's own errors all"
    assert sum(map(len, map(str, lines))) < 20_000


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
            for number in range(1500):  # 200 kB of lines; a pipe holds 64 kB
                answer = client.post("/embed", json={"inputs": "a"}, headers={"x-a": 60_000 * "a"})
                assert answer.status_code == 200
                if number == 500:
                    before = psutil.Process(process.pid).memory_info().rss
        grown = psutil.Process(process.pid).memory_info().rss - before
        assert grown < 30_000_000, "what waits has no headers"
        process.terminate()
        assert process.wait(25) == 0
    finally:
        process.kill()
        process.wait()
        os.close(read_end)


def test_the_oldest_lines_without_room_are_counted(capfd: pytest.CaptureFixture[str]) -> None:
    writer = LineWriter(most_waiting=2)
    writer.waiting.extend(f"{number}\n" for number in range(4))
    writer.begin()
    writer.flush()
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["2 lines are missing: the log was read too slowly", "2", "3"]


def test_lines_stay_bounded_while_a_write_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process took the room in the pipe after the poll, and nobody reads."""
    is_writing, may_end = threading.Event(), threading.Event()

    def write(_: int, data: bytes) -> int:
        is_writing.set()
        may_end.wait(20)
        return len(data)

    writer = LineWriter(most_waiting=100)
    monkeypatch.setattr(os, "write", write)
    writer.waiting.append("first\n")
    writer.begin()
    try:
        assert is_writing.wait(20)
        for _ in range(1000):
            writer.handle(logging.makeLogRecord({"msg": "more"}))
        assert len(writer.waiting) <= 200
    finally:
        may_end.set()
        writer.flush()


def test_a_signal_handler_may_log_while_its_thread_logs() -> None:
    code = (
        "import logging, signal, time; from cloze.service.observe.logs import start_logging; "
        "start_logging('info', 'text'); log = logging.getLogger('cloze'); "
        "signal.signal(signal.SIGALRM, lambda *_: log.info('drain')); "
        "signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003); end = time.monotonic() + 1\n"
        "while time.monotonic() < end: log.info('refused')\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)"
    )
    subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=True, timeout=20)


def test_a_log_that_cannot_be_written_stops_the_start() -> None:
    code = "from cloze.service.observe.logs import announce, start_logging; "
    code += "start_logging('info', 'text'); announce('listening')"
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stderr=full, check=False, timeout=20)
    assert done.returncode != 0


def test_lines_of_several_processes_do_not_mix() -> None:
    """Both write to one pipe of a page, which is full when the reader begins."""
    code = (
        "import sys; from cloze.service.observe.logs import LineWriter; writer = LineWriter(); "
        "writer.begin(); writer.waiting.extend([sys.argv[1] * 999 + '\\n'] * 300); "
        "print(flush=True); writer.flush()"
    )
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, letter], stderr=write_end, stdout=subprocess.PIPE
        )
        for letter in "ab"
    ]
    os.close(write_end)
    for process in processes:
        process.stdout.readline()
    with os.fdopen(read_end) as log:
        lines = log.read().splitlines()
    assert [process.communicate(timeout=20) for process in processes] == [(b"", None)] * 2
    assert Counter(lines) == {"a" * 999: 300, "b" * 999: 300}
