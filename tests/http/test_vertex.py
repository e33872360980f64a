"""Vertex AI's and KServe's instances: what runs, what each prediction is, and what is refused."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from cloze.service.service import single_process
from cloze.service.settings import load_settings
from tests.support.route_service import EMBEDDER, Service

PREDICT = "/v1/models/tiny:predict"
PAIR = {"question": "the", "context": "of"}
SENTENCES = {"source_sentence": "the", "sentences": ["of"]}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("bundle"), ({}, EMBEDDER)) as made:
        yield made


def predictions(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    assert response.json().keys() == {"predictions"}
    return response.json()["predictions"]


@pytest.mark.parametrize("path", ["/vertex", PREDICT])
def test_a_prediction_is_the_native_answer(service: Service, path: str) -> None:
    """However many inputs an instance has, and whether or not they are in a list."""
    for route, all_inputs in {
        "/embed": ["the", ["of", "the of"], [5, 6], [[5, 6], [7]]],
        "/fill-mask": ["the [MASK]", ["of [MASK]"], ["[MASK] [MASK]", "the [MASK]"]],
        "/qa": [PAIR, [PAIR, PAIR]],
        "/similarity": [SENTENCES],
        "/nsp": [{"text": "the", "next": "of"}, [{"text": "the", "next": "of"}]],
    }.items():
        runs = service.engine.runs
        found = predictions(service.post(path, {"instances": [{"inputs": i} for i in all_inputs]}))
        assert service.engine.runs - runs < 8
        assert found == [service.post(route, {"inputs": one}).json() for one in all_inputs]
    assert predictions(service.post(path, {"instances": ["the"]})) == [[[0.6, 0, 0.8, 0]]]


def test_nested_values_are_refused_and_not_compared_without_end(service: Service) -> None:
    nested: Any = "x"
    for _ in range(900):
        nested = [nested]
    for field in ("normalize", "type", "parameters", "model"):
        body = {"instances": [{"inputs": "the", field: nested}] * 2}
        assert service.post("/vertex", body).status_code == 422, field


def test_each_instance_does_not_read_all_parameters(tiny_store: Path) -> None:
    """Else this body needs the event loop for seconds: instances times parameters."""
    parameters = {"normalize": True} | dict.fromkeys(map(str, range(25_000)))
    body = {"instances": ["the"] * 2000 + [1.5], "parameters": parameters}
    server = single_process(load_settings({"model_store": tiny_store, "model": "bert"}))
    with TestClient(server, base_url="http://localhost") as client:
        started = time.process_time()
        response = client.post("/vertex", json=body)
        spent = time.process_time() - started
    assert response.json()["error"].startswith("instances[2000] is a number")
    assert spent < 1
