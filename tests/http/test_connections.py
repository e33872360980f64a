"""Slow and hostile clients: each limit of connections, and what other clients notice."""

import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.cores import Stopwatch
from tests.support.faulty import embed
from tests.support.serving import Server, running_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)


def address(server: Server) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(address(server), timeout=10)


@contextmanager
def connections(server: Server, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        opened = [stack.enter_context(connect(server)) for _ in range(count)]
        for connection in opened:
            connection.sendall(sent)
        yield opened


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.02)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


def test_few_files_mean_few_connections_and_nobody_is_shut_out(tiny_store: Path) -> None:
    """A server with 128 descriptors, and 300 connections that send nothing."""
    program = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)); "
        "sys.argv = ['cloze', 'serve', *sys.argv[1:]]; "
        "runpy.run_module('cloze', run_name='__main__')"
    )
    with (
        running_server(
            tiny_store, "--model", "bert", command=(sys.executable, "-c", program)
        ) as server,
        connections(server, 300),
    ):
        for _ in range(5):
            assert embed(server, "walk").status_code == 200


HEAD = b"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", HEAD[:25], HEAD], ids=["idle", "half-sent head", "body"])
def test_thousands_of_connections_disturb_nobody(tiny_store: Path, sent: bytes) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = 5000
    if hard < count + 500:
        pytest.skip(f"the limit of open files is {hard}; the test needs {count + 500}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    names = ("CLOZE_HEADER_TIMEOUT_MS", "CLOZE_IDLE_TIMEOUT_MS", "CLOZE_REQUEST_TIMEOUT_MS")
    limits = dict.fromkeys(names, "3000") | {"CLOZE_TRUSTED_PROXIES": "127.0.0.1"}
    other = {"x-forwarded-for": "192.0.2.1"}  # a client that opened none of the connections
    try:
        with (
            running_server(tiny_store, "--model", "bert", **limits) as server,
            httpx.Client(headers=other) as client,
            connections(server, count, sent) as opened,
        ):
            for _ in range(20):
                stopwatch = Stopwatch(server.process.pid)
                answer = client.post(f"{server.url}/embed", json={"inputs": "walk"})
                assert answer.status_code == 200, answer.text
                assert stopwatch.elapsed_s() < 2.0
                time.sleep(0.05)
            wait_until(lambda: not any(map(is_open, opened[:20] + opened[-20:])), longest_s=40)
            assert client.post(f"{server.url}/embed", json={"inputs": "walk"}).status_code == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
