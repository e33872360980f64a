"""Replicas behind a real HAProxy and a real nginx, with the documented configurations: a lost one, and
a roll of all of them, cost nothing.
"""

import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from http.client import HTTPConnection
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import uvloop

from cloze.bench.http_client import Request, post
from cloze.bench.load import closed_loop
from cloze.bench.processes import RunningServer, free_port
from tests.support.haproxy import CLIENTS, balancing, listening, load_with_a_loss
from tests.support.loopback import Handler, serving
from tests.support.serving import Server, running_server


def address(server: Server) -> str:
    return server.url.removeprefix("http://")


@contextmanager
def nginx(addresses: Sequence[str], folder: Path) -> Iterator[str]:
    """Run nginx with the documented configuration before other servers, and return its URL."""
    text = (Path(__file__).parents[2] / "docs/nginx.conf").read_text()
    servers = "".join(f"server {each} max_fails=1 fail_timeout=2s;\n" for each in addresses)
    text, count = re.subn(r"(?: *server 127[^\n]*max_fails=1 fail_timeout=2s;\n)+", servers, text)
    assert count == 1
    port = free_port()
    text, count = re.subn(r"listen 127.0.0.1:8080;", f"listen 127.0.0.1:{port};", text)
    assert count == 1
    # The package's folders belong to root.
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text(text.replace("http {\n", "http {\n" + folders, 1))
    options = f"daemon off; pid {folder}/pid; error_log {folder}/log;"
    with listening(["nginx", "-c", str(folder / "nginx.conf"), "-g", options], port) as url:
        yield url


Balancer = Callable[[Sequence[str], Path], AbstractContextManager[str]]


@pytest.fixture(
    params=[balancing, pytest.param(nginx, marks=pytest.mark.slow)], ids=["haproxy", "nginx"]
)
def balancer(request: pytest.FixtureRequest) -> Balancer:
    """Run a balancer before the servers of the given addresses."""
    name = request.node.callspec.id
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed (Debian's package {name})")
    run: Balancer = request.param
    return run


def test_the_service_sees_the_client_and_not_what_it_writes(
    balancer: Balancer, tmp_path: Path
) -> None:
    senders = []

    class Replica(Handler):
        def do_GET(self) -> None:
            senders.append(self.headers.get_all("x-forwarded-for"))
            self.answer(200)

    with (
        serving(ThreadingHTTPServer(("127.0.0.1", 0), Replica)) as replica,
        balancer([f"127.0.0.1:{replica.server_port}"], tmp_path) as url,
    ):
        forged = {"x-forwarded-for": "6.6.6.6"}
        assert httpx.get(f"{url}/info", headers=forged).status_code == 200
    (values,) = [each for each in senders if each]
    assert ", ".join(values) == "6.6.6.6, 127.0.0.1"


BODIES: list[dict[str, Any]] = [{"inputs": "a moon"}, {"inputs": ["the old king " * 20] * 24}]
REQUESTS = [Request(post("/embed", orjson.dumps(body))) for body in BODIES]


def test_a_replica_that_dies_under_load_costs_no_request(
    balancer: Balancer, tiny_store: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        replicas = [
            stack.enter_context(running_server(tiny_store, "--model", "bert")) for _ in range(3)
        ]
        url = stack.enter_context(balancer([address(each) for each in replicas], tmp_path))
        victim = RunningServer(replicas[0].url, replicas[0].process.pid, 0.0)
        load = uvloop.run(load_with_a_loss(url, REQUESTS, victim, 4.0))
        assert replicas[0].process.wait(5) == -9
        assert load.statuses.keys() == {200}
        assert load.requests > 100
        for target in ("/metrics", "/%6detrics", f"{url}/metrics", "/%61dmin/reload"):
            with closing(HTTPConnection(url.removeprefix("http://"))) as connection:
                connection.request("GET", target)
                assert connection.getresponse().status == 403, target


@pytest.mark.slow
def test_a_roll_of_all_replicas_under_load_costs_no_request(
    balancer: Balancer, tiny_store: Path, tmp_path: Path
) -> None:
    """One replica after another drains, ends and starts again at its address."""
    statuses: set[int] = set()
    rolled = threading.Event()
    ports = [str(free_port()) for _ in range(3)]
    with ExitStack() as stack:

        def start(port: str) -> Server:
            arguments = ("--model", "bert", "--port", port)
            return stack.enter_context(running_server(tiny_store, *arguments, CLOZE_DRAIN_S="1"))

        replicas = [start(port) for port in ports]
        url = stack.enter_context(balancer([address(each) for each in replicas], tmp_path))

        def load() -> None:
            while not rolled.is_set():
                result = uvloop.run(closed_loop(url, REQUESTS, clients=CLIENTS, seconds=2))
                statuses.update(result.statuses)

        thread = threading.Thread(target=load)
        thread.start()
        try:
            for port, replica in zip(ports, replicas, strict=True):
                assert replica.stop() == 0
                start(port)
        finally:
            rolled.set()
            thread.join()
    assert statuses == {200}
