"""UnreadAnswers that clients do not read: they hold bounded memory, and harm nobody else."""

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import orjson
import pytest
from cloze.service.http.memory_limit import Hold, UnreadAnswers

from cloze.model_store.locations import DEFAULT_ROOT
from cloze.service.http import memory_limit
from tests.leaping_loop import run_leaping
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

    def unsent_bytes(self) -> int:
        return self.unread

    def end(self, reason: str) -> None:
        self.ended = reason

    async def read(self, bytes_per_s: float, seconds: float) -> None:
        """Read steadily."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while loop.time() < until:
            await asyncio.sleep(0.1)
            self.unread -= round(bytes_per_s / 10)


async def send(answers: UnreadAnswers, client: str, size: int) -> FakeReader:
    """Send an answer to a client that has read nothing of it."""
    reader = FakeReader(size)
    hold = await answers.hold(client, size, waits=True)
    assert hold is not None
    answers.sent(reader, hold)
    return reader


def wait(answers: UnreadAnswers, client: str, size: int) -> "asyncio.Task[Hold | None]":
    return asyncio.create_task(answers.hold(client, size, waits=True))


def test_a_large_answer_waits_until_another_is_read_quickly() -> None:
    async def play() -> None:
        answers = UnreadAnswers(6 * MB)
        reader = await send(answers, "a", 2 * MB)
        waiting = wait(answers, "a", 2 * MB)
        await reader.read(2 * memory_limit.HURRIED_RATE, 3 * memory_limit.HURRIED_GRACE_S)
        assert not waiting.done()
        assert not reader.ended
        answers.was_read(reader)
        assert (await waiting) is not None

    run_leaping(play())


def test_who_reads_a_little_now_and_then_is_closed_if_others_wait() -> None:
    """A client has a buffer per second of each of its three answers; another one waits."""

    async def play() -> None:
        answers = UnreadAnswers(6 * MB)
        readers = [await send(answers, "a", MB) for _ in range(3)]
        frugal = await send(answers, "b", MB)
        everybody = [*readers, frugal]
        await asyncio.gather(
            *(
                reader.read(2 * memory_limit.RATE, 2 * memory_limit.HURRIED_GRACE_S)
                for reader in everybody
            )
        )
        assert not any(reader.ended for reader in everybody), "nobody needs the room"
        waiting = wait(answers, "c", 3 * MB)
        await asyncio.gather(
            *(
                reader.read(2 * memory_limit.RATE, memory_limit.HURRIED_GRACE_S)
                for reader in everybody
            )
        )
        assert {reader.ended for reader in readers} == {"it reads its answer too slowly"}
        assert not frugal.ended, "it holds less than the average"
        for reader in readers:
            answers.was_read(reader)  # the connection is lost
        assert (await waiting) is not None

    run_leaping(play())


def test_a_slow_client_is_closed_only_below_the_least_rate_while_nobody_waits() -> None:
    async def play() -> None:
        answers = UnreadAnswers(6 * MB)
        slow, slower = [await send(answers, "a", MB) for _ in range(2)]
        await asyncio.gather(
            slow.read(2 * memory_limit.RATE, 3 * memory_limit.GRACE_S),
            slower.read(memory_limit.RATE / 2, 3 * memory_limit.GRACE_S),
        )
        assert slower.ended
        assert not slow.ended

    run_leaping(play())


def test_a_client_holds_half_of_the_room_and_of_the_turns() -> None:
    async def play() -> None:
        answers = UnreadAnswers(6 * MB)
        await send(answers, "a", 3 * MB)
        waiting = wait(answers, "a", MB)
        await asyncio.wait_for(send(answers, "b", 3 * MB), 1)
        turns = [await answers.begin("a") for _ in range(2)]
        third = asyncio.create_task(answers.begin("a"))
        answers.done(await asyncio.wait_for(answers.begin("b"), 1))
        assert not third.done()
        answers.done(turns[0])
        await asyncio.wait_for(third, 1)
        assert not waiting.done()
        waiting.cancel()

    run_leaping(play())


def test_a_smaller_answer_does_not_wait_but_counts() -> None:
    async def play() -> None:
        answers = UnreadAnswers(2 * MB)
        first = await answers.hold("a", MB, waits=True)
        second = await answers.hold("a", MB // 2, waits=False)
        assert first is not None
        assert second is not None
        waiting = wait(answers, "a", MB)
        answers.sent(None, first)
        await asyncio.sleep(0)
        assert not waiting.done(), "the second one still has half of the room"
        answers.sent(FakeReader(0), second)
        assert (await waiting) is not None
        assert await answers.hold("a", 100, waits=True) is None

    run_leaping(play())


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
    """Twenty answers of 6 MB that a client does not read, and may have two of: others get theirs."""
    settings = {
        "CLOZE_MAX_ANSWERS_BYTES": str(26 * MB),
        "CLOZE_MAX_QUEUE_WAIT_MS": "0",
        "CLOZE_TRUSTED_PROXIES": "127.0.0.1",
    }
    other = {"x-forwarded-for": "192.0.2.1"}
    with running_server(DEFAULT_ROOT, *mode, **settings) as server:
        # What the engine takes for such a request is no part of what answers hold.
        httpx.post(server.url + path, content=orjson.dumps(BODY), timeout=90).raise_for_status()
        before = peaks_mb(server.process.pid)
        with deaf_clients(server, 20, path), ThreadPoolExecutor(1) as pool:
            large = pool.submit(
                httpx.post, server.url + path, content=orjson.dumps(BODY), headers=other, timeout=90
            )
            while not large.done():
                small = httpx.post(f"{server.url}/embed", json={"inputs": "walk"}, timeout=60)
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
