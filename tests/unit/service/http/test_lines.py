"""Lines of the access log, and the bytes of probes."""

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from cloze.service.core import ServedRequest
from cloze.service.observe.logs import AccessLog, LineWriter, _line
from cloze.service.server.acceptor import Probes
from tests.support.waiting import wait_until

COST = {"texts": 2, "tokens": 30, "tokenize_s": 0.001, "queue_s": 0.002, "inference_s": 0.003}


def record(status: int = 200, **changes: Any) -> ServedRequest:
    fields: dict[str, Any] = {
        "ended": 1_700_000_000.125, "identity": b"r1", "route": "/embed", "model": "bert@1",
        "status": status, "seconds": 0.0123456,
    }  # fmt: skip
    noted = COST if status < 400 else {}
    return ServedRequest(**(fields | noted | changes))


def logged(*records: ServedRequest, level: int = logging.INFO, share: float = 1.0) -> list[str]:
    writer = LineWriter()
    log = AccessLog("json", level, share, frozenset({"/health"}), writer)
    for one in records:
        log.add(one)
    lines = [json.loads(_line(*each)) for each in writer.waiting]
    return [line["route"] + str(line["status"]) for line in lines]


def test_a_line_of_json() -> None:
    line = _line("json", record())
    assert line.endswith("\n")
    values = json.loads(line)
    assert values.pop("time").startswith("2023-11-14T22:13:20.125")
    assert values == {
        "level": "info", "message": "request", "method": "POST", "route": "/embed", "status": 200,
        "id": "r1", "model": "bert@1", "texts": 2, "tokens": 30,
        "ms": {"total": 12.35, "tokenize": 1.0, "queue": 2.0, "inference": 3.0},
    }  # fmt: skip
    error = json.loads(_line("json", record(429, model="", error="wait")))
    assert (error["level"], error["error"], error["ms"]) == ("warning", "wait", {"total": 12.35})
    assert "model" not in error
    assert "texts" not in error


def test_which_requests_are_logged() -> None:
    all_of_them = [
        record(),
        record(400),
        record(500),
        record(route="/health"),
        record(503, route="/health"),
    ]
    assert logged(*all_of_them) == ["/embed200", "/embed400", "/embed500", "/health503"]
    assert logged(*all_of_them, level=logging.WARNING) == ["/embed400", "/embed500", "/health503"]
    assert logged(*all_of_them, level=logging.ERROR) == ["/embed500", "/health503"]
    assert logged(*all_of_them, level=logging.DEBUG)[3] == "/health200"
    assert logged(*all_of_them, share=0.0) == ["/embed400", "/embed500", "/health503"]
    assert 10 < len(logged(*[record()] * 200, share=0.3)) < 120


# ---- probes ------------------------------------------------------------------------------------

GOOD = (
    b"GET /health HTTP/1.1\r\nHost: cloze:8000\r\nUser-Agent: kube\r\nAccept: */*\r\n"
    b"Accept-Encoding: gzip\r\nConnection: Close\r\n\r\n"
)


def answer(received: bytes, hosts: frozenset[bytes] = frozenset()) -> bytes | None:
    return Probes({b"/health": lambda: b'"up"', b"/ready": lambda: None}, hosts)._answer(received)


def test_a_probe_is_answered() -> None:
    sent = answer(GOOD)
    assert sent is not None
    head, body = sent.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
    assert b"\r\ncontent-length: 4\r\ncontent-type: application/json\r\nx-request-id: " in head
    assert head.endswith(b"\r\nconnection: close")
    assert body == b'"up"'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"GET", b"PUT"),
        (b"/health", b"/other"),
        (b"/health", b"/ready"),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"Connection: Close\r\n", b""),
        (b"Connection: Close", b"Connection: keep-alive"),
        (b"Host: cloze:8000\r\n", b""),
        (b"User-Agent: kube", b"Authorization: x"),
        (b"User-Agent: kube", b"Accept: again"),
        (b"\r\n\r\n", b"\r\n"),
        (b"\r\n\r\n", b"\r\n\r\nGET /"),
    ],
)
def test_all_else_goes_the_usual_way(old: bytes, new: bytes) -> None:
    assert old in GOOD
    assert answer(GOOD.replace(old, new)) is None


def test_a_probe_is_for_an_accepted_host() -> None:
    assert answer(GOOD, frozenset({b"cloze"})) is not None
    assert answer(GOOD, frozenset({b"other"})) is None


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client's socket and the server's end of its connection."""
    client, server = socket.socketpair()
    with client, server:
        server.setblocking(False)
        client.settimeout(5)
        yield client, server


def probes(hosts: frozenset[bytes] = frozenset()) -> Probes:
    return Probes({b"/health": lambda: b'"up"', b"/ready": lambda: None}, hosts)


def test_a_probe_ends_its_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    client.sendall(GOOD)
    assert probes().answers(server)
    received = b""
    while part := client.recv(4096):
        received += part
    assert received.endswith(b'\r\n\r\n"up"')
    assert server.fileno() == -1


def test_what_is_no_probe_is_left_on_the_connection(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, server = pair
    assert not probes().answers(server), "nothing has arrived"
    for sent in (GOOD[:-1], GOOD.replace(b"/health", b"/ready"), GOOD + b"x"):
        client.sendall(sent)
        assert not probes().answers(server)
        assert server.recv(9999) == sent
    client.close()
    assert not probes().answers(server)
    assert server.fileno() > 0


def test_a_probe_has_1024_bytes_at_most(pair: tuple[socket.socket, socket.socket]) -> None:
    client, server = pair
    longest = GOOD.replace(b"kube", b"k" * (1024 - len(GOOD) + 4))
    assert len(longest) == 1024
    longer = longest.replace(b"User-Agent: ", b"User-Agent:  ")
    client.sendall(longer)
    assert not probes().answers(server)
    assert server.recv(9999) == longer
    client.sendall(longest)
    assert probes().answers(server)


# ---- the thread that writes --------------------------------------------------------------------


def test_lines_are_written_soon_by_a_thread_of_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    writer = LineWriter()
    log = AccessLog("json", logging.INFO, 1.0, frozenset(), writer)
    writer.begin()
    for status in (200, 201):
        log.add(record(status))
    wait_until(lambda: not writer.waiting)
    writer.flush()
    lines = capfd.readouterr().err.splitlines()
    assert [json.loads(line)["status"] for line in lines] == [200, 201]
