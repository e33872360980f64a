"""Servers on loopback, each on a thread of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

S = TypeVar("S", bound=ThreadingHTTPServer)


class Handler(BaseHTTPRequestHandler):
    """Answers requests, and writes no log."""

    def answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        """Send an answer; ``_`` in the name of a header stands for a hyphen."""
        self.send_response(status)
        for name, value in {"content_length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Be silent."""


@contextmanager
def serving(server: S) -> Iterator[S]:
    """Serve until the block ends."""
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"
