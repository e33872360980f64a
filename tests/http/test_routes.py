"""Every route that runs a model has the same way in: gate, drain, limits, one spelling of a path."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import orjson
import pytest
from starlette.testclient import TestClient

from cloze.service.service import single_process
from cloze.service.settings import load_settings
from tests.support.faulty import FAULTY, metric
from tests.support.refusals import error_of
from tests.support.serving import Server, running_server
from tests.support.waiting import wait_until
from tests.system.test_admission import SLOW

OPERATORS = {"/admin/reload"}
"""The POST routes that run no model."""


class Sample(NamedTuple):
    """A POST route, as a path that a client sends, and an example of its body."""

    path: str
    body: bytes


def samples(server: Server) -> list[Sample]:
    """Return one sample per POST route of a server that runs a model."""
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    names = {"{model}": "cloze-bert.embed", "{version}": "1"}
    found = []
    for route, operations in paths.items():
        if "post" not in operations or route in OPERATORS:
            continue
        content = operations["post"]["requestBody"]["content"]["application/json"]
        example = next(iter(content["examples"].values()))["value"]
        path = re.sub(r"\{\w+\}", lambda part: names[part[0]], route)
        found.append(Sample(path, orjson.dumps(example)))
    assert len(found) >= 18
    assert {"/", "/embed", "/rerank", "/tokenize", "/decode"} <= {path for path, _ in found}
    return found


def check_shape(path: str, error: Any) -> None:
    """Check that an error has the shape of the protocol of a path."""
    if path == "/v2/embed":
        assert error.keys() == {"message"}, path
    elif path.startswith("/v2"):
        assert error.keys() == {"error"}, path
    elif path.startswith(("/v1", "/embeddings")):
        assert error["error"].keys() == {"message", "type", "param", "code"}, path
    else:
        assert error.keys() == {"error", "error_type", "code"}, path


SLOW_CALLS: dict[str, tuple[str, object]] = {
    "cloze-bert": ("/embed", "moon"),
    "cloze-qa": ("/qa", {"question": "moon", "context": "moon"}),
    "bert-classifier": ("/classify", "moon"),
    "bert-tagger": ("/token-classification", "moon"),
}
"""By model, a route and an input that takes 0.15 s."""


def runs_with_river(server: Server) -> int:
    """Return how many runs have begun that take 1.5 s."""
    return sum("a run with river starts" in line for line in server.log)


@pytest.fixture(scope="module")
def full(every_task_store: Path) -> Iterator[Server]:
    """A server that refuses, because texts run for the next seconds in each model."""
    starting = running_server(every_task_store, command=FAULTY, **SLOW)
    calls = SLOW_CALLS.values()
    with starting as server, ThreadPoolExecutor(40) as pool, httpx.Client(timeout=60) as client:

        def ask(path: str, inputs: object) -> httpx.Response:
            return client.post(server.url + path, json={"inputs": inputs})

        for number, (path, slow) in enumerate(calls):
            # Before the end of the first run, no rate is known, and every request is admitted.
            first = orjson.loads(orjson.dumps(slow).replace(b"moon", b"river"))
            blocker = pool.submit(ask, path, first)
            wait_until(lambda started=number + 1: runs_with_river(server) >= started)
            for _ in range(8):
                pool.submit(ask, path, [slow] * 20)
            assert blocker.result().status_code == 200

        def is_full() -> bool:
            waiting = (
                metric(server, rf'cloze_queue_tokens\{{model="{model}",version="1"\}}')
                for model in SLOW_CALLS
            )
            return min(waiting) >= 100

        wait_until(is_full)
        yield server
        server.process.kill()  # else the requests would take half a minute


def test_a_full_server_refuses_every_route_before_it_reads_the_body(full: Server) -> None:
    for path, _ in samples(full):
        refused = httpx.post(full.url + path, content=b"no json", headers={"x-request-id": "mine"})
        assert error_of(refused) == (429, "overloaded"), path
        assert refused.headers["x-request-id"] == "mine"
        check_shape(path, refused.json())


def test_a_drain_refuses_every_route(every_task: Server, every_task_store: Path) -> None:
    service = single_process(load_settings({"model_store": every_task_store}))
    with TestClient(service, base_url="http://localhost") as client:
        service.drain()
        for path, body in samples(every_task):
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), path
            check_shape(path, answer.json())


# ---- tokenize and decode -------------------------------------------------------------------------
