"""Probes that have arrived with their connection are answered at once, and only they."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

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
