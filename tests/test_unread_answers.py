"""Answers that clients do not read: they hold bounded memory, and harm nobody else."""

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import orjson
import pytest

from cloze.model_store.locations import DEFAULT_ROOT
from cloze.service.http import answers as module
from cloze.service.http.answers import Answers
from tests.serving import Server, running_server
from tests.test_memory import peaks_mb

MB = 2**20
BODY = {"inputs": ["the [MASK] " * 60] * 4, "parameters": {"top_k": 34}}
"""240 masks with 34 predictions: an answer of 6 MB."""


class FakeReader:
    """A connection that reads when the test says so."""

    def __init__(self, unread: int) -> None:
        self.unread = unread
        self.ended = ""

    def unread_bytes(self) -> int:
        return self.unread

    def end(self, reason: str) -> None:
        self.ended = reason


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the times."""
    for name in ("_TICK_S", "_STALL_S", "_STALL_WHILE_FULL_S"):
        monkeypatch.setattr(module, name, getattr(module, name) / 100)


@pytest.mark.usefixtures("quick")
def test_a_large_answer_waits_until_another_is_read() -> None:
    async def play() -> None:
        answers, reader = Answers(3 * MB), FakeReader(2 * MB)
        answers.sent(reader, await answers.hold(2 * MB, waits=True))
        waiting = asyncio.create_task(answers.hold(2 * MB, waits=True))
        for _ in range(4):  # slowly, but it reads
            await asyncio.sleep(module._STALL_WHILE_FULL_S / 2)
            reader.unread -= 1
        assert not waiting.done()
        assert not reader.ended
        answers.was_read(reader)
        assert await waiting == 2 * MB

    asyncio.run(play())


@pytest.mark.usefixtures("quick")
def test_who_does_not_read_is_closed_and_sooner_if_others_wait() -> None:
    async def play() -> None:
        answers, reader = Answers(3 * MB), FakeReader(2 * MB)
        answers.sent(reader, await answers.hold(2 * MB, waits=True))
        await asyncio.sleep(3 * module._STALL_WHILE_FULL_S)
        assert not reader.ended, "nobody needs the room"
        waiting = asyncio.create_task(answers.hold(2 * MB, waits=True))
        await asyncio.sleep(2 * module._STALL_WHILE_FULL_S)
        assert reader.ended == "it does not read its answer"
        answers.was_read(reader)  # the connection is lost
        assert await waiting == 2 * MB
        alone = FakeReader(2 * MB)
        answers.sent(alone, 2 * MB)
        await asyncio.sleep(1.5 * module._STALL_S)
        assert alone.ended

    asyncio.run(play())


def test_a_smaller_answer_does_not_wait_but_counts() -> None:
    async def play() -> None:
        answers = Answers(1 * MB)
        first = await answers.hold(MB, waits=True)
        second = await answers.hold(MB // 2, waits=False)
        waiting = asyncio.create_task(answers.hold(MB, waits=True))
        answers.sent(None, first)
        await asyncio.sleep(0)
        assert not waiting.done(), "the second one still has half of the room"
        answers.sent(FakeReader(0), second)
        assert await waiting == MB
        assert await answers.hold(100, waits=True) == 0

    asyncio.run(play())


@contextmanager
def deaf_clients(server: Server, count: int, path: str) -> Iterator[list[socket.socket]]:
    """Clients that send a request and read nothing, each with a small receive buffer."""
    body = orjson.dumps(BODY)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(head.encode() + body)
            clients.append(client)
        yield clients


@pytest.mark.parametrize("mode", [(), ("--frontends", "1")], ids=["one-process", "front-end"])
@pytest.mark.parametrize("path", ["/fill-mask", "/"])
def test_clients_that_do_not_read_cost_bounded_memory_and_harm_nobody(
    mode: tuple[str, ...], path: str
) -> None:
    """Twenty answers of 6 MB that nobody reads, with room for two: other clients get theirs."""
    settings = {"CLOZE_MAX_ANSWERS_BYTES": str(13 * MB), "CLOZE_MAX_QUEUE_WAIT_MS": "0"}
    with running_server(DEFAULT_ROOT, *mode, **settings) as server:
        # What the engine takes for such a request is no part of what answers hold.
        httpx.post(server.url + path, content=orjson.dumps(BODY), timeout=90).raise_for_status()
        before = peaks_mb(server.process.pid)
        with deaf_clients(server, 20, path), ThreadPoolExecutor(1) as pool:
            large = pool.submit(
                httpx.post, server.url + path, content=orjson.dumps(BODY), timeout=90
            )
            while not large.done():
                small = httpx.post(f"{server.url}/embed", json={"inputs": "walk"}, timeout=10)
                assert small.status_code == 200
                time.sleep(0.2)
            assert large.result().status_code == 200
            assert len(large.result().content) > 5 * MB
        after = peaks_mb(server.process.pid)
    growth = {pid: after[pid] - before[pid] for pid in after}
    assert max(growth.values()) < 90, growth  # without a bound: 130


def test_a_slow_client_gets_its_whole_answer() -> None:
    """It reads for longer than a connection may be idle."""
    with running_server(DEFAULT_ROOT, CLOZE_IDLE_TIMEOUT_MS="1000") as server:
        with deaf_clients(server, 1, "/fill-mask") as [client]:
            received, started = 0, time.monotonic()
            head = client.recv(4096)
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            total = head.index(b"\r\n\r\n") + 4 + size
            received = len(head)
            while received < total:
                data = client.recv(MB)
                assert data, f"closed after {received} of {total} bytes"
                received += len(data)
                if time.monotonic() - started < 3.0:
                    time.sleep(0.1)
        assert received == total
