"""Replicas behind a real HAProxy, with the documented configuration: a lost one costs nothing."""

import shutil
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import orjson
import pytest
import uvloop

from cloze.bench.haproxy import balancing, load_with_a_loss
from cloze.bench.http_client import Request, post
from cloze.bench.processes import RunningServer
from tests.serving import Server, running_server


def address(server: Server) -> str:
    return server.url.removeprefix("http://")


@pytest.fixture(autouse=True)
def haproxy() -> None:
    if shutil.which("haproxy") is None:
        pytest.skip("haproxy is not installed (Debian's package haproxy)")


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
