"""Connections that are accepted, and probes, which are answered before they have a protocol."""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cloze.service.server import acceptor as acceptor_module
from cloze.service.server.acceptor import Acceptor, Probes

pytestmark = pytest.mark.anyio

GOOD = (
    b"GET /health HTTP/1.1\r\nHost: cloze:8000\r\nUser-Agent: kube\r\nAccept: */*\r\n"
    b"Accept-Encoding: gzip\r\nConnection: Close\r\n\r\n"
)


def probes(*hosts: bytes) -> Probes:
    return Probes({b"/health": lambda: b'"up"', b"/ready": lambda: None}, frozenset(hosts))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A client's socket and the server's end of its connection."""
    client, server = socket.socketpair()
    with client, server:
        server.setblocking(False)
        client.settimeout(5)
        yield client, server


Pair = tuple[socket.socket, socket.socket]


def test_a_probe_is_answered_and_ends_its_connection(pair: Pair) -> None:
    client, server = pair
    client.sendall(GOOD)
    assert probes(b"cloze").answers(server)
    received = b""
    while part := client.recv(4096):
        received += part
    head, body = received.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
    assert b"\r\ncontent-length: 4\r\ncontent-type: application/json\r\nx-request-id: " in head
    assert head.endswith(b"\r\nconnection: close")
    assert body == b'"up"'
    assert server.fileno() == -1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"GET", b"PUT"),
        (b"/health", b"/other"),
        (b"/health", b"/ready"),
        (b"HTTP/1.1", b"HTTP/1.0"),
        (b"Connection: Close\r\n", b""),
        (b"Connection: Close", b"Connection: keep-alive"),
        (b"Host: cloze:8000\r\n", b""),
        (b"Host: cloze", b"Host: evil"),
        (b"User-Agent: kube", b"Authorization: x"),
        (b"User-Agent: kube", b"Accept: again"),
        (b"\r\n\r\n", b"\r\n"),
        (b"\r\n\r\n", b"\r\n\r\nGET /"),
    ],
)
def test_all_else_is_left_on_the_connection(pair: Pair, old: bytes, new: bytes) -> None:
    client, server = pair
    assert not probes().answers(server), "nothing has arrived"
    assert old in GOOD
    client.sendall(GOOD.replace(old, new))
    assert not probes(b"cloze").answers(server)
    assert server.recv(9999) == GOOD.replace(old, new)
    client.close()
    assert not probes().answers(server)
    assert server.fileno() > 0


def test_a_probe_has_1024_bytes_at_most(pair: Pair) -> None:
    client, server = pair
    longest = GOOD.replace(b"kube", b"k" * (1024 - len(GOOD) + 4))
    longer = longest.replace(b"User-Agent: ", b"User-Agent:  ")
    client.sendall(longer)
    assert not probes().answers(server)
    assert server.recv(9999) == longer
    client.sendall(longest)
    assert probes().answers(server)


@pytest.fixture
def anyio_backend() -> str:
    """Return a loop for which time passes: sockets are real here."""
    return "asyncio"


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")
        transport.close()


@asynccontextmanager
async def accepting(
    listener: socket.socket, context: Callable[[], ssl.SSLContext | None] = lambda: None
) -> AsyncIterator[Acceptor]:
    acceptor = Acceptor(listener, Greeter, context, probes())
    yield acceptor
    acceptor.close()
    await acceptor.wait_closed()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as made:
        yield made


def connect(listener: socket.socket, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(listener.getsockname())
    client.sendall(sent)
    client.setblocking(False)
    return client


async def received(client: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    with client:
        return await asyncio.wait_for(loop.sock_recv(client, 999), 20)


async def test_connections_are_accepted_and_probes_answered_at_once(
    listener: socket.socket,
) -> None:
    """Also more of them than one turn of the loop takes."""
    clients = [connect(listener, GOOD if number == 1 else b"x") for number in range(40)]
    async with accepting(listener) as acceptor:
        acceptor.begin()
        first, second, *others = [await received(client) for client in clients]
    assert {first, *others} == {b"hello"}
    assert second.startswith(b"HTTP/1.1 200 OK")


async def test_an_acceptor_accepts_from_its_begin_until_it_is_closed(
    listener: socket.socket,
) -> None:
    async with accepting(listener) as acceptor:
        early = connect(listener)
        await asyncio.sleep(0.05)
        with pytest.raises(BlockingIOError):
            early.recv(1)
        acceptor.begin()
        assert await received(early) == b"hello"
        acceptor.close()
        acceptor.begin()
        with connect(listener) as late:
            await asyncio.sleep(0.05)
            with pytest.raises(BlockingIOError):
                late.recv(1)


class FullOnce(socket.socket):
    """A listening socket of a process that has run out of files once."""

    failed = False

    def accept(self) -> Any:
        if not self.failed:
            self.failed = True
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_a_process_without_files_accepts_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor_module, "_PAUSE_S", 0.01)
    with FullOnce() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        async with accepting(listener) as acceptor:
            acceptor.begin()
            assert await received(connect(listener)) == b"hello"
    assert caplog.messages == ["connections wait: Too many open files"]


async def test_connections_of_clients_that_have_gone_are_closed(listener: socket.socket) -> None:
    """A client that speaks no TLS, and one that is gone before its handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    plain = connect(listener, GOOD)
    connect(listener).close()
    async with accepting(listener, lambda: context) as acceptor:
        acceptor.begin()
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = await received(plain)
        assert not answer.startswith(b"HTTP"), "with TLS, nobody answers in plain text"
