"""Answers that clients do not read: they hold bounded memory, and harm nobody else."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import orjson
import pytest

from cloze.model_store.locations import DEFAULT_ROOT
from tests.support.serving import Server, running_server
from tests.system.test_memory import peaks_mb

MB = 2**20
BODY = {"inputs": ["the [MASK] " * 60] * 4, "parameters": {"top_k": 34}}
"""240 masks with 34 predictions: an answer of 6 MB."""


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


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), ("--frontends", "1")], ids=["one-process", "front-end"])
def test_clients_that_do_not_read_cost_bounded_memory_and_harm_nobody(
    mode: tuple[str, ...],
) -> None:
    """Twenty answers of 6 MB that a client does not read, and may have two of: others get theirs."""
    path = "/fill-mask"
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
