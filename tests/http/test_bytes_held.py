"""Clients that send no whole body, or read no answer, cost bounded memory and harm nobody else."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import orjson
import pytest

from cloze.model_store.locations import DEFAULT_ROOT
from tests.support.serving import Server, peaks_mb, running_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

MB = 2**20
MASKS = orjson.dumps({"inputs": ["the [MASK] " * 60] * 4, "parameters": {"top_k": 34}})
"""240 masks with 34 predictions: an answer of 6 MB."""


@contextmanager
def senders(server: Server, count: int, head: str, body: bytes) -> Iterator[list[socket.socket]]:
    """Clients that send this, and read nothing, each with a small receive buffer."""
    host, port = server.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(count)]
        for client in clients:
            client.settimeout(30)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(f"{head} HTTP/1.1\r\nhost: localhost\r\n".encode() + body)
        yield clients


def test_bodies_that_stall_make_others_wait_until_their_time_limit(tiny_store: Path) -> None:
    """Five bodies of 200 kB that do not end hold what one address may hold."""
    limits = {"CLOZE_MAX_BODIES_BYTES": str(2 * MB), "CLOZE_MAX_REQUEST_BYTES": str(MB)}
    part = b"%x\r\n" % 200_000 + b" " * 200_000 + b"\r\n"
    begun = b"x-request-timeout-ms: 9000\r\ntransfer-encoding: chunked\r\n\r\n" + part
    large = orjson.dumps({"inputs": "walk " * 40_000, "truncate": True})
    settings = limits | {"CLOZE_MAX_QUEUE_WAIT_MS": "200"}
    with running_server(tiny_store, "--model", "bert", **settings) as server:

        def post() -> httpx.Response:
            return httpx.post(f"{server.url}/embed", content=large, timeout=60)

        with senders(server, 5, "POST /embed", begun) as stalled:
            wait_until(lambda: post().status_code == 429)
            refused = post()
            assert refused.headers["x-error-code"] == "overloaded"
            assert refused.headers["retry-after"] == "1"
            wait_until(lambda: post().status_code == 200, 30)
            for answer in [client.recv(65_536) for client in stalled]:
                assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
                assert b"\r\nconnection: close" in answer


def test_clients_that_do_not_read_cost_bounded_memory_and_harm_nobody() -> None:
    """Twenty answers of 6 MB that a client does not read, and may have two of: others get theirs."""
    settings = {
        "CLOZE_MAX_ANSWERS_BYTES": str(26 * MB),
        "CLOZE_MAX_QUEUE_WAIT_MS": "0",
        "CLOZE_TRUSTED_PROXIES": "127.0.0.1",
    }
    other = {"x-forwarded-for": "192.0.2.1"}
    sent = b"content-length: %d\r\n\r\n" % len(MASKS) + MASKS
    with running_server(DEFAULT_ROOT, "--frontends", "1", **settings) as server:
        url = f"{server.url}/fill-mask"
        # What the engine takes for such a request is no part of what answers hold.
        httpx.post(url, content=MASKS, timeout=90).raise_for_status()
        before = peaks_mb(server.process.pid)
        with senders(server, 20, "POST /fill-mask", sent), ThreadPoolExecutor(1) as pool:
            large = pool.submit(httpx.post, url, content=MASKS, headers=other, timeout=90)
            while not large.done():
                small = httpx.post(f"{server.url}/embed", json={"inputs": "walk"}, timeout=60)
                assert small.status_code == 200
                time.sleep(0.2)
            assert large.result().status_code == 200
            assert len(large.result().content) > 5 * MB
        after = peaks_mb(server.process.pid)
    growth = {pid: after[pid] - before[pid] for pid in after}
    assert max(growth.values()) < 90, growth  # without a bound: 130
