"""Clients with thousands of connections, and ones that send no whole body or read no answer."""

import resource
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import orjson
import pytest

from cloze.model_store.locations import DEFAULT_ROOT
from tests.support.faulty import embed
from tests.support.serving import Server, peaks_mb, running_server
from tests.support.waiting import wait_until

FEW_FILES = (
    "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)); "
    "sys.argv = ['cloze', 'serve', *sys.argv[1:]]; "
    "runpy.run_module('cloze', run_name='__main__')"
)


def test_few_files_mean_few_connections_and_nobody_is_shut_out(tiny_store: Path) -> None:
    """A server with 128 descriptors, and 300 connections that send nothing."""
    command = (sys.executable, "-c", FEW_FILES)
    with (
        running_server(tiny_store, "--model", "bert", command=command) as server,
        ExitStack() as stack,
    ):
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(300):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        for _ in range(5):
            assert embed(server, "walk").status_code == 200


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(65_536) == b""
    except OSError as error:
        return not isinstance(error, BlockingIOError)


@pytest.mark.slow
def test_thousands_of_half_sent_requests_disturb_nobody_and_end(tiny_store: Path) -> None:
    count, (soft, hard) = 3000, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count + 500:
        pytest.skip(f"the limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limits = {"CLOZE_HEADER_TIMEOUT_MS": "5000", "CLOZE_TRUSTED_PROXIES": "127.0.0.1"}
    other = {"x-forwarded-for": "192.0.2.1"}  # a client that opened none of the connections
    try:
        with (
            running_server(tiny_store, "--model", "bert", **limits) as server,
            httpx.Client(base_url=server.url, headers=other, timeout=30) as client,
            ExitStack() as stack,
        ):
            host, port = server.url.removeprefix("http://").split(":")
            opened = []
            for _ in range(count):
                one = stack.enter_context(socket.create_connection((host, int(port)), 10))
                one.sendall(b"POST /embed HTTP/1.1\r\nhost: loc")
                one.setblocking(False)
                opened.append(one)
            for _ in range(20):
                assert client.post("/embed", json={"inputs": "walk"}).status_code == 200
            wait_until(lambda: all(map(is_closed, opened)), 60)
            assert client.post("/embed", json={"inputs": "walk"}).status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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


@pytest.mark.slow
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


@pytest.mark.slow
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
