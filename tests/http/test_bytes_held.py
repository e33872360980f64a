"""The bodies of large requests are bounded: they hold what has arrived, wait, or are refused."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import orjson
import pytest

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
    host, port = server.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            clients.append(stack.enter_context(socket.create_connection((host, int(port)), 30)))
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
        assert refused.json()["code"] == "overloaded"
        assert refused.headers["retry-after"] == "1"
    assert post_large(server).status_code == 200, "the others have left"
