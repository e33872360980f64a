"""The bodies of large requests are bounded: they hold what has arrived, wait, or are refused."""

import asyncio
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
from cloze.service.http.memory_limit import Hold, MemoryLimit

from cloze.service.core import Overloaded
from tests.serving import Server, running_server
from tests.test_connections import address
from tests.waiting import wait_until

KB = 1024
MB = 1024 * KB


async def hold(memory: MemoryLimit, client: str, size: int) -> Hold:
    made = Hold(client)
    await memory.grow(made, size)
    return made


async def start(memory: MemoryLimit, client: str, size: int) -> asyncio.Task[Hold]:
    """Begin to wait for memory."""
    task = asyncio.create_task(hold(memory, client, size))
    await asyncio.sleep(0)
    return task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_bodies_of_a_client_wait_in_the_order_of_their_arrival() -> None:
    async def play() -> None:
        memory = MemoryLimit("bodies", 600 * KB, 5.0)
        first, second = await hold(memory, "a", 200 * KB), await hold(memory, "a", 100 * KB)
        large, small = await start(memory, "a", 250 * KB), await start(memory, "a", 70 * KB)
        memory.shrink(second)
        await settle()
        assert not small.done(), "the smaller one would fit, but came later"
        memory.shrink(first)
        memory.shrink(await large)
        assert (await small).size == 70 * KB

    asyncio.run(play())


def test_a_body_that_gives_up_no_longer_stands_in_the_way() -> None:
    async def play() -> None:
        memory = MemoryLimit("bodies", 200 * KB, 5.0)
        await hold(memory, "a", 60 * KB)
        large, small = await start(memory, "a", 70 * KB), await start(memory, "a", 30 * KB)
        await settle()
        assert not small.done()
        large.cancel()
        await settle()
        assert small.done()
        assert (await small).size == 30 * KB

    asyncio.run(play())


def test_a_client_holds_half_at_most_and_another_gets_the_rest() -> None:
    async def play() -> None:
        memory = MemoryLimit("bodies", 200 * KB, 0.02)
        greedy = await hold(memory, "a", 900 * KB)
        assert greedy.size == 100 * KB, "what needs more than a share gets a share"
        with pytest.raises(Overloaded, match=r"this client hold 102400 bytes; with 10 .* 102400$"):
            await hold(memory, "a", 10)
        assert (await hold(memory, "b", 100 * KB)).size == 100 * KB
        with pytest.raises(Overloaded, match=r"all clients hold 204800 bytes; with 10 .* 204800$"):
            await hold(memory, "c", 10)

    asyncio.run(play())


def test_who_holds_least_is_served_first() -> None:
    async def play() -> None:
        memory = MemoryLimit("bodies", 200 * KB, 5.0)
        heavy, other = await hold(memory, "a", 80 * KB), await hold(memory, "b", 100 * KB)
        order: list[str] = []
        for client in ("a", "c"):
            task = await start(memory, client, 20 * KB + 1)
            task.add_done_callback(lambda _, client=client: order.append(client))
        memory.shrink(heavy, 79 * KB)
        await settle()
        assert order == ["c"]
        memory.shrink(other)
        await settle()
        assert order == ["c", "a"]

    asyncio.run(play())


def test_who_waits_for_too_long_or_leaves_holds_nothing() -> None:
    async def play() -> None:
        memory = MemoryLimit("bodies", 200 * KB, 0.02)
        held = await hold(memory, "a", 80 * KB)
        with pytest.raises(Overloaded):
            await hold(memory, "a", 90 * KB)
        gone, served = await start(memory, "a", 90 * KB), await start(memory, "a", 90 * KB)
        memory.shrink(held)
        gone.cancel()  # it has its memory, but has not run since
        with pytest.raises(asyncio.CancelledError):
            await gone
        memory.shrink(await served)
        assert (await hold(memory, "a", 100 * KB)).size == 100 * KB

    asyncio.run(play())


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [
        ({"a1": 40, "a2": 20, "a3": 30}, ["a2"]),  # the share of a client is stuck
        ({"a1": 60, "b1": 65, "c1": 60}, ["b1"]),  # the whole memory is
    ],
)
def test_if_holds_wait_for_each_other_one_is_refused_at_once(
    sizes: dict[str, int], refused: list[str]
) -> None:
    async def play() -> None:
        memory = MemoryLimit("bodies", 200 * KB)
        holds = {name: await hold(memory, name[0], size * KB) for name, size in sizes.items()}

        async def grow(name: str) -> None:
            try:
                await memory.grow(holds[name], holds[name].size + 30 * KB)
            finally:
                memory.shrink(holds[name])

        results = await asyncio.gather(*map(grow, holds), return_exceptions=True)
        errors = [name for name, error in zip(holds, results, strict=True) if error]
        assert errors == refused

    asyncio.run(play())


def test_those_must_hurry_who_hold_what_others_wait_for() -> None:
    async def play() -> None:
        memory = MemoryLimit("bodies", 200 * KB, 5.0)
        most, less = await hold(memory, "a", 100 * KB), await hold(memory, "b", 30 * KB)
        assert memory.crowding() == set()
        own = await start(memory, "a", 1)
        assert memory.crowding() == {"a"}, "its share is full, and nobody else's concern"
        waiting = await start(memory, "c", 71 * KB)
        assert memory.crowding() == {"a"}, "b holds less than the average"
        memory.shrink(most)
        assert memory.crowding() == set()
        memory.shrink(less)
        await own
        await waiting

    asyncio.run(play())


# ---- a server ------------------------------------------------------------------------------------

LARGE = orjson.dumps({"inputs": "walk " * 40_000, "truncate": True})
"""A body of 200 kB."""


def head(length: str, *headers: str) -> bytes:
    lines = ("POST /v2/models/bert.embed/infer HTTP/1.1", "host: localhost", length, *headers)
    return "\r\n".join((*lines, "x-request-timeout-ms: 300000", "", "")).encode()


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


def test_bodies_that_stall_while_others_wait_end_and_give_their_memory(server: Server) -> None:
    """Five bodies of 200 kB that do not end: together, what an address may hold."""
    sent = head("transfer-encoding: chunked") + chunk(200_000)
    with senders(server, 5, sent) as stalled:
        assert post_large(server).status_code == 200
        for answer in [client.recv(65_536) for client in stalled]:
            assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            assert b'{"error":"the body arrives too slowly: 200000 bytes so far; ' in answer


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
