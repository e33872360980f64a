"""The bodies of large requests are bounded: they hold what has arrived, wait, or are refused."""

import gzip
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import orjson
import pytest

from tests.http.test_connections import address
from tests.support.serving import Server, running_server
from tests.support.waiting import wait_until

KB = 1024
MB = 1024 * KB


LARGE = orjson.dumps({"inputs": "walk " * 40_000, "truncate": True})
"""A body of 200 kB."""


def head(length: str, *headers: str, limit_ms: int = 300_000) -> bytes:
    lines = ("POST /v2/models/bert.embed/infer HTTP/1.1", "host: localhost", length, *headers)
    return "\r\n".join((*lines, f"x-request-timeout-ms: {limit_ms}", "", "")).encode()


def chunk(size: int) -> bytes:
    return b"%x\r\n" % size + b" " * size + b"\r\n"


@contextmanager
def senders(server: Server, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """Clients that have sent the beginning of a request."""
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            clients.append(stack.enter_context(socket.create_connection(address(server), 30)))
            clients[-1].sendall(sent)
        yield clients


def post_large(server: Server) -> httpx.Response:
    return httpx.post(f"{server.url}/embed", content=LARGE, timeout=60)


@pytest.fixture(scope="module")
def server(tiny_store: Path) -> Iterator[Server]:
    """A server with 2 MB for bodies, 1 MB per client."""
    limits = {
        "CLOZE_MAX_BODIES_BYTES": str(2 * MB),
        "CLOZE_MAX_REQUEST_BYTES": str(MB),
        "CLOZE_MAX_QUEUE_WAIT_MS": "5000",
    }
    with running_server(tiny_store, "--model", "bert", **limits) as running:
        yield running


@pytest.mark.parametrize(
    "sent",
    [
        head("transfer-encoding: chunked"),
        head(f"content-length: {MB}"),
        head("transfer-encoding: chunked") + chunk(70_000),
        head("content-length: 60", "content-encoding: gzip") + gzip.compress(b" ")[:9],
    ],
    ids=["chunked", "announced", "begun", "gzip"],
)
def test_what_is_announced_and_not_sent_holds_no_memory(server: Server, sent: bytes) -> None:
    with senders(server, 6, sent):
        time.sleep(0.1)  # so that the server has read what was sent
        assert post_large(server).status_code == 200


def test_bodies_that_stall_end_at_their_time_limit_and_give_their_memory(server: Server) -> None:
    """Five bodies of 200 kB that do not end: together, what an address may hold."""
    sent = head("transfer-encoding: chunked", limit_ms=2000) + chunk(200_000)
    with senders(server, 5, sent) as stalled:
        wait_until(lambda: post_large(server).status_code == 200)
        for answer in [client.recv(65_536) for client in stalled]:
            assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            assert b'{"error":"200000 bytes of the body arrived within the limit' in answer
            assert b"\r\nconnection: close" in answer


def test_a_body_that_finds_no_room_is_refused(server: Server) -> None:
    with senders(server, 5, head("transfer-encoding: chunked") + chunk(200_000)):
        wait_until(lambda: post_large(server).status_code == 429)
        refused = post_large(server)
        assert refused.json()["error"].startswith("the bodies of this client hold 1000000 bytes; ")
        assert refused.headers["retry-after"] == "1"
    assert post_large(server).status_code == 200, "the others have left"


def test_the_body_of_a_refused_request_is_discarded(server: Server) -> None:
    """The next request of the connection is answered, whatever the body looks like."""
    body = b"POST /embed HTTP/1.1\r\nhost: localhost\r\n\r\n" * 10_000
    refused = head(f"content-length: {len(body)}").replace(b": 300000", b": soon")
    with senders(server, 1, refused) as [client]:
        assert client.recv(65_536).startswith(b"HTTP/1.1 400 ")
        client.sendall(body + b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.recv(65_536).startswith(b"HTTP/1.1 200 OK")


def test_bodies_that_cannot_all_arrive_end_and_the_others_are_answered(tiny_store: Path) -> None:
    """Eight bodies of 0.5 MB, sent by and by at once, where 1 MB may be held."""
    limits = {"CLOZE_MAX_BODIES_BYTES": str(2 * MB)}
    body = orjson.dumps({"inputs": "walk", "model": "bert"}) + b" " * (MB // 2)
    message = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    parts = [message[at : at + 32_768] for at in range(0, len(message), 32_768)]
    start_of_all = head("transfer-encoding: chunked").replace(
        b"/v2/models/bert.embed/infer", b"/embed"
    )
    with running_server(tiny_store, "--model", "bert", **limits) as server:
        with senders(server, 8, start_of_all) as clients, ThreadPoolExecutor(8) as pool:
            for part in parts:
                list(pool.map(lambda client, part=part: send(client, part), clients))
            statuses = [client.recv(65_536).split()[1] for client in clients]
        assert set(statuses) <= {b"200", b"429"}
        assert b"200" in statuses
        wait_until(lambda: post_large(server).status_code == 200)


def send(client: socket.socket, part: bytes) -> None:
    """Send a part of a body, which a server that has answered may not read."""
    with suppress(OSError):
        client.sendall(part)


def test_a_refused_client_that_asks_whether_to_send_its_body_is_closed(server: Server) -> None:
    """It may send its body or not, so nobody knows where its next request would begin."""
    refused = head(f"content-length: {2 * MB}", "expect: 100-continue")
    with senders(server, 1, refused) as [client]:
        answer = b""
        while part := client.recv(65_536):
            answer += part
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert answer.count(b"\r\nconnection: close\r\n") == 1
