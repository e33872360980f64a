"""Servers with thousands of connections, and with more connections than file descriptors."""

import resource
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.faulty import embed
from tests.support.serving import running_server
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
