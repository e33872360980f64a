"""Every route that runs a model has the same way in: gate, drain, limits, one spelling of a path."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import orjson
from starlette.testclient import TestClient

from cloze.service.service import single_process
from cloze.service.settings import load_settings
from tests.support.serving import Server

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


def test_a_drain_refuses_every_route(every_task: Server, every_task_store: Path) -> None:
    service = single_process(load_settings({"model_store": every_task_store}))
    with TestClient(service, base_url="http://localhost") as client:
        service.drain()
        for path, body in samples(every_task):
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), path
            check_shape(path, answer.json())
