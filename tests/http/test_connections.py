"""Slow and hostile clients: each limit of connections, and what other clients notice."""

import re
import resource
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.support.certificates import make_certificate
from tests.support.cores import Stopwatch
from tests.support.faulty import FAULTY, embed, wait_for_run
from tests.support.serving import Server, bare_environment, failed_start, running_server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

LIMITS = {"CLOZE_HEADER_TIMEOUT_MS": "400", "CLOZE_IDLE_TIMEOUT_MS": "900"}


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


def listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.02)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


def test_headers_must_arrive_in_time(tiny_store: Path) -> None:
    """However steadily the bytes come."""
    with (
        running_server(tiny_store, "--model", "bert", CLOZE_HEADER_TIMEOUT_MS="400") as server,
        connect(server) as connection,
    ):
        started = time.monotonic()
        with suppress(OSError):
            for byte in b"POST /embed HTTP/1.1\r\nhost: localhost\r\n" * 10:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
        with suppress(ConnectionResetError):
            while connection.recv(65536):
                pass
        assert 0.3 < time.monotonic() - started < 3


def test_a_busy_connection_never_makes_room(tiny_store: Path) -> None:
    limits = {"CLOZE_MAX_CONNECTIONS": "2", "CLOZE_WORKERS": "2", "CLOZE_MAX_BATCH_TOKENS": "1"}
    head = b"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: 19\r\n\r\n"
    request = head + b'{"inputs": "river"}'
    with (
        running_server(tiny_store, "--model", "bert", command=FAULTY, **limits) as server,
        connections(server, 2, request) as busy,
    ):
        wait_for_run(server, "river", count=2)
        with connect(server) as refused:
            answer = refused.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1" in answer
        assert b"the server has 2 connections, the most" in answer
        for connection in busy:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert any("a connection was refused" in line for line in server.log)


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


def test_a_connection_that_opens_during_the_drain_ends_with_it(
    tiny_store: Path, tmp_path: Path
) -> None:
    """Its TLS handshake ends while another connection still has its answer to come."""
    public, private = make_certificate(tmp_path)
    tls = ("--tls-certificate", str(public), "--tls-key", str(private))
    trusting = ssl.create_default_context(cafile=str(public))
    with (
        running_server(tiny_store, "--model", "bert", *tls, command=FAULTY) as server,
        httpx.Client(verify=trusting) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        host, port = server.url.removeprefix("https://").split(":")
        slow = pool.submit(client.post, f"{server.url}/embed", json={"inputs": "river"})
        wait_for_run(server, "river")
        with socket.create_connection((host, int(port)), timeout=10) as opening:
            assert client.get(f"{server.url}/readyz").status_code == 200  # it is accepted by then
            server.process.terminate()
            wait_until(lambda: any("draining" in line for line in server.log))
            wait_until(lambda: not listens((host, int(port))))
            with trusting.wrap_socket(opening, server_hostname="localhost"):
                assert slow.result().status_code == 200
                assert server.process.wait(8) == 0


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TRUSTED_PROXIES", "10.0.0.0/8,nowhere", "CLOZE_TRUSTED_PROXIES: 'nowhere' does not"),
        ("HEADER_TIMEOUT_MS", "5", "CLOZE_HEADER_TIMEOUT_MS: .*100"),
    ],
)
def test_a_wrong_setting_is_one_line(variable: str, value: str, message: str) -> None:
    log = failed_start(env=bare_environment(**{f"CLOZE_{variable}": value}))
    assert len(log.splitlines()) == 1
    assert re.search(message, log), log
