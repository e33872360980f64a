"""Probes that have arrived with their connection are answered at once, and only they."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cloze.service.http.record import accepted_hosts
from cloze.service.server.acceptor import Probes
from tests.support.serving import running_server

PROBE = (
    b"GET /healthz HTTP/1.1\r\nHost: localhost:8000\r\nUser-Agent: kube-probe/1.36\r\n"
    b"Accept: */*\r\nConnection: close\r\n\r\n"
)


@contextmanager
def connection(sent: bytes) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return the client's and the server's end of a connection on which bytes have arrived."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        ours.sendall(sent)
        yield ours, theirs


def probes(body: bytes | None = b"{}") -> Probes:
    return Probes({b"/healthz": lambda: body}, accepted_hosts("127.0.0.1", ()))


def test_a_plain_probe_is_answered() -> None:
    with connection(PROBE) as (ours, theirs):
        assert probes().answers(theirs)
        answer = ours.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"\r\nconnection: close\r\n\r\n{}")
        assert ours.recv(4096) == b"", "the connection has ended"


def test_a_probe_under_an_address_is_answered() -> None:
    """A kubelet asks a pod by its address, which no setting names."""
    with connection(PROBE.replace(b"localhost:8000", b"10.0.0.7:8000")) as (ours, theirs):
        assert probes().answers(theirs)
        assert ours.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        PROBE[:-2],
        PROBE + b"GET ",
        PROBE + PROBE,
        PROBE.replace(b"GET", b"POST"),
        PROBE.replace(b"1.1", b"1.0"),
        PROBE.replace(b"/healthz", b"/healthz?x=1"),
        PROBE.replace(b"/healthz", b"/embed"),
        PROBE.replace(b"localhost", b"evil.example"),
        PROBE.replace(b"User-Agent", b"host"),
        PROBE.replace(b"Host: localhost:8000\r\n", b""),
        PROBE.replace(b"Accept: */*", b"Content-Length: 2"),
        PROBE.replace(b"Accept: */*", b"X-Request-Id: mine"),
        PROBE.replace(b"kube-probe", b"k" * 2000),
        PROBE.replace(b"close", b"keep-alive"),
        PROBE.replace(b"Connection: close\r\n", b""),
    ],
)
def test_anything_else_is_left_unread(sent: bytes) -> None:
    with connection(sent) as (_, theirs):
        assert not probes().answers(theirs)
        if sent:
            assert theirs.recv(8192) == sent


def test_bad_news_goes_the_usual_way() -> None:
    with connection(PROBE) as (_, theirs):
        assert not probes(body=None).answers(theirs)


def test_a_busy_server_answers_as_an_idle_one(tiny_store: Path) -> None:
    """The bytes arrive while the server is stopped, so they are there when it accepts."""
    with running_server(tiny_store, "--model", "bert") as server:
        host, port = server.url.removeprefix("http://").split(":")
        for path in ("/healthz", "/readyz"):
            usual = httpx.get(server.url + path)
            server.process.send_signal(signal.SIGSTOP)
            with socket.create_connection((host, int(port)), timeout=10) as client:
                client.sendall(PROBE.replace(b"/healthz", path.encode()))
                server.process.send_signal(signal.SIGCONT)
                head, _, body = client.makefile("rb").read().decode().partition("\r\n\r\n")
            status, *headers = head.split("\r\n")
            names = {header.split(":")[0] for header in headers}
            assert status == "HTTP/1.1 200 OK"
            assert names == {*usual.headers, "connection"}, "it came by the short way"
            assert body == usual.text
