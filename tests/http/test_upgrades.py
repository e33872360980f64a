"""Clients that offer another protocol, and are answered in HTTP/1.1 as if they had not.

`tests/unit/service/http/test_server_protocol.py` divides such requests at each byte.
"""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.serving import Server, running_server

pytestmark = pytest.mark.timeout(120)

BODY = b'{"inputs": "the king"}'
INNER = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
OFFERS = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "nonsense": b"Connection: upgrade\r\nUpgrade: x/1, , y\r\n",
}


@pytest.fixture(scope="module")
def server(tiny_store: Path) -> Iterator[Server]:
    with running_server(tiny_store, "--model", "bert") as running:
        yield running


def embedded(server: Server) -> bytes:
    return httpx.post(f"{server.url}/embed", content=BODY).content


def exchange(server: Server, *parts: bytes) -> list[tuple[int, bytes]]:
    """Send packets, the last of which ends the connection; return the status and body of each
    answer.
    """
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
            time.sleep(0.02)  # so that each is a packet of its own
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    answers = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields[b"content-length"])
        answers.append((int(head.split()[1]), received[:length]))
        received = received[length:]
    return answers


def post(body: bytes, *headers: bytes) -> bytes:
    head = b"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n" % len(body)
    return head + b"".join(headers) + b"\r\n" + body


LAST = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
@pytest.mark.parametrize("packets", [1, 2, 9])
def test_a_body_belongs_to_its_request(server: Server, offer: bytes, packets: int) -> None:
    """A body that arrives after its head is no request of its own, whatever it looks like."""
    bad = httpx.post(f"{server.url}/embed", content=INNER).content
    for body, answer in ((BODY, (200, embedded(server))), (INNER, (400, bad))):
        request = post(body, offer)
        size = len(body) // (packets - 1) + 1 if packets > 1 else len(request)
        first = len(request) - len(body) if packets > 1 else len(request)
        parts = [request[at : at + size] for at in range(first, len(request), size)]
        answers = exchange(server, request[:first], *parts, request, LAST)  # its connection is kept
        assert answers[:2] == [answer] * 2
        assert [status for status, _ in answers] == [answer[0]] * 2 + [200]


def test_curl_offers_http_2(server: Server, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    if "HTTP2" not in subprocess.run(["curl", "-V"], capture_output=True, text=True).stdout:
        pytest.skip("this curl lacks HTTP/2")
    (tmp_path / "small").write_bytes(BODY)
    (tmp_path / "large").write_bytes(BODY + b" " * 300_000)
    command, report = ["curl", "-sS"], "%{http_code} %{http_version} %{num_connects}\n"
    for name in ("small", "large", "small"):
        body = f"@{tmp_path / name}"
        command += ["--http2", "--data-binary", body, "-o", str(tmp_path / "answer")]
        command += ["-w", report, f"{server.url}/embed", "--next"]
    done = subprocess.run(command[:-1], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["200 1.1 1", "200 1.1 0", "200 1.1 0"], done.stderr
    assert (tmp_path / "answer").read_bytes() == embedded(server)
    done = subprocess.run(
        ["curl", "-sS", "--http2-prior-knowledge", server.url], capture_output=True, text=True
    )
    assert done.returncode, "it does not wait for ever"


def test_http_2_without_an_offer_is_refused(server: Server) -> None:
    [(status, body)] = exchange(server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(9))
    assert status == 505
    assert json.loads(body)["error"] == "the server speaks HTTP/1.1 only, not HTTP/2"


def test_connect_is_refused_and_nothing_after_it_is_read(server: Server) -> None:
    head = b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost:80\r\n\r\n"
    for parts in ((head, INNER), (head + INNER,)):
        [(status, body)] = exchange(server, *parts)
        assert status == 405
        assert "no proxy" in json.loads(body)["error"]


def test_the_client_of_java(server: Server) -> None:
    """It offers HTTP/2 on each connection that it opens without TLS."""
    if (java := shutil.which("java")) is None:
        pytest.skip("there is no java; Debian: openjdk-17-jdk-headless")
    program = Path(__file__).parents[1] / "clients" / "Upgrading.java"
    done = subprocess.run([java, program, server.url], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    version, *answers = done.stdout.splitlines()
    print(version)
    assert answers == [f"HTTP_1_1 200 {embedded(server).decode()}"] * 26
