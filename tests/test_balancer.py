"""Replicas behind a real HAProxy, with the documented configuration: a lost one costs nothing."""

import shutil
import threading
import urllib.request
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest
import uvloop

from cloze.bench.haproxy import balancing, load_with_a_loss
from cloze.bench.http_client import Request, post
from cloze.bench.processes import RunningServer
from cloze.service.http.record import Callers
from tests.serving import Server, running_server


def address(server: Server) -> str:
    return server.url.removeprefix("http://")


@pytest.fixture(autouse=True)
def haproxy() -> None:
    if shutil.which("haproxy") is None:
        pytest.skip("haproxy is not installed (Debian's package haproxy)")


def test_the_service_sees_the_client_and_not_what_it_writes(tmp_path: Path) -> None:
    senders = []

    class Replica(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            senders.append(self.headers.get_all("x-forwarded-for"))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Replica) as replica:
        threading.Thread(target=replica.serve_forever, daemon=True).start()
        with balancing([f"127.0.0.1:{replica.server_port}"], tmp_path) as url:
            forged = urllib.request.Request(f"{url}/info", headers={"x-forwarded-for": "6.6.6.6"})
            with urllib.request.urlopen(forged) as answer:
                assert answer.status == 200
        replica.shutdown()
    assert ["6.6.6.6", "127.0.0.1"] in senders
    headers = [(b"x-forwarded-for", address) for address in (b"6.6.6.6", b"192.0.2.7")]
    scope = {"method": "POST", "path": "/embed", "client": ("127.0.0.1", 1), "headers": headers}
    assert Callers(["127.0.0.1"]).record(scope, "/embed").client == "192.0.2.7"


def test_a_replica_that_dies_under_load_costs_no_request(tiny_store: Path, tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [{"inputs": "a moon"}, {"inputs": ["the old king " * 20] * 24}]
    requests = [Request(post("/embed", orjson.dumps(body))) for body in bodies]
    with ExitStack() as stack:
        replicas = [
            stack.enter_context(running_server(tiny_store, "--model", "bert")) for _ in range(3)
        ]
        url = stack.enter_context(balancing([address(each) for each in replicas], tmp_path))
        victim = RunningServer(replicas[0].url, replicas[0].process.pid, 0.0)
        load = uvloop.run(load_with_a_loss(url, requests, victim, 4.0))
        assert replicas[0].process.wait(5) == -9
        assert load.statuses.keys() == {200}
        assert load.requests > 100
        for target in ("/metrics", "/%6detrics", f"{url}/metrics", "/%61dmin/reload"):
            with closing(HTTPConnection(url.removeprefix("http://"))) as connection:
                connection.request("GET", target)
                assert connection.getresponse().status == 403, target
