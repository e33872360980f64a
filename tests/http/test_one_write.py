"""An answer is written at once, so that a killed process leaves no half of it."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving import Server, running_server


@pytest.fixture(scope="module")
def server(tiny_store: Path) -> Iterator[Server]:
    with running_server(tiny_store, "--model", "bert") as running:
        yield running


def first_bytes(server: Server, request: bytes) -> bytes:
    """Return what the first read of an answer finds."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request)
        return connection.recv(1 << 20)


def test_a_server_writes_an_answer_at_once(server: Server) -> None:
    body = b'{"inputs": ["the old king", "a moon"]}'
    request = b"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    for _ in range(20):
        answer = first_bytes(server, request + body)
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"]]")


def test_the_answer_to_head_does_not_wait_for_a_body(server: Server) -> None:
    answer = first_bytes(server, b"HEAD /info HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")
