"""A burst of requests starts a few at a time, so that others need not wait for it."""

import selectors
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import orjson

from tests.support.serving import running_server


def test_a_probe_does_not_wait_for_a_burst(tiny_store: Path) -> None:
    """600 requests whose tokenizing takes 0.6 s or more have arrived before the probe."""
    body = orjson.dumps({"inputs": "walk " * 780})
    head = f"POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    # A busy machine takes longer than 30 s; a request that cannot end in its time is refused.
    settings = {"CLOZE_MAX_QUEUE_WAIT_MS": "0", "CLOZE_REQUEST_TIMEOUT_MS": "300000"}
    with (
        running_server(tiny_store, "--model", "bert", **settings) as server,
        ExitStack() as stack,
    ):
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        host, port = server.url.removeprefix("http://").split(":")
        clients = [
            stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(601)
        ]
        clients[-1].sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert clients[-1].recv(65536).startswith(b"HTTP/1.1 200"), "all before it are accepted"
        server.process.send_signal(signal.SIGSTOP)
        for client in clients[:-1]:
            client.sendall(request)
        probe = clients[-1]
        probe.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        started = time.monotonic()
        server.process.send_signal(signal.SIGCONT)
        assert probe.recv(65536).startswith(b"HTTP/1.1 200")
        waited_s = time.monotonic() - started
        with selectors.DefaultSelector() as selector:
            for client in clients[:-1]:
                selector.register(client, selectors.EVENT_READ)
            answered = 0
            while answered < 600:
                for key, _ in selector.select():
                    assert key.fileobj.recv(12) == b"HTTP/1.1 200"  # type: ignore[union-attr]
                    selector.unregister(key.fileobj)
                    answered += 1
        all_s = time.monotonic() - started
        assert waited_s < 0.25 * all_s, (waited_s, all_s)
