"""An answer is written at once, so that a killed process leaves no half of it."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from cloze.service.http.uvicorn_internals import OneWrite
from tests.serving import Server, running_server


class Recorder:
    def __init__(self) -> None:
        self.events: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.events.append(data)

    def close(self) -> None:
        self.events.append("close")

    def is_closing(self) -> bool:
        return "close" in self.events


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def transport(recorder: Recorder) -> OneWrite:
    return OneWrite(cast(asyncio.Transport, recorder))


def test_a_head_waits_for_its_body(recorder: Recorder, transport: OneWrite) -> None:
    transport.write(b"head ")
    assert recorder.events == []
    transport.write(b"body")
    transport.write(b"more")
    assert recorder.events == [b"head body", b"more"]


def test_an_empty_body_releases_the_head(recorder: Recorder, transport: OneWrite) -> None:
    transport.write(b"head")
    transport.write(b"")
    assert recorder.events == [b"head"]


def test_a_large_body_is_not_copied(recorder: Recorder, transport: OneWrite) -> None:
    body = bytes(70_000)
    transport.write(b"head")
    transport.write(body)
    assert recorder.events[0] == b"head"
    assert recorder.events[1] is body


def test_a_client_that_waits_for_continue_gets_it(recorder: Recorder, transport: OneWrite) -> None:
    transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert recorder.events == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    transport.write(b"head ")
    transport.write(b"body")
    assert recorder.events[1:] == [b"head body"]


def test_an_answer_that_breaks_off_shows_its_head(recorder: Recorder, transport: OneWrite) -> None:
    transport.write(b"head")
    transport.close()
    transport.close()
    assert recorder.events == [b"head", "close", "close"]
    assert transport.is_closing()


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
