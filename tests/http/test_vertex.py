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
from tests.support.route_service import CLASSIFIER, EMBEDDER, MAX_TEXTS, Service

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


def test_parameters_are_those_of_the_request_and_of_the_instances(service: Service) -> None:
    raw = {"inputs": "the", "parameters": {"normalize": False}}
    body = {"instances": [raw, raw], "parameters": {"normalize": True, "dimensions": 3}, "mine": 1}
    response = service.post("/vertex", body, accept="application/octet-stream")
    assert predictions(response) == [[[3, 0, 4]]] * 2
    assert response.headers["x-warning"] == "ignored unknown fields: mine"
    masks = {"instances": ["a [MASK]", "[MASK]"], "parameters": {"top_k": 2, "return_usage": True}}
    found = predictions(service.post(PREDICT, masks))
    assert [len(one["result"]) for one in found] == [2, 2]
    assert [one["usage"][0]["tokens"] for one in found] == [4, 3]
    typed = {"inputs": "the", "type": "text_classification", "parameters": {"top_k": 1}}
    assert len(predictions(service.post("/vertex", {"instances": [typed, typed]}))[1][0]) == 1


def test_an_instance_may_be_a_request_for_ranks(service: Service) -> None:
    """As in text-embeddings-inference, whose instances have the type ``rerank``."""
    body = {"query": "the", "texts": ["of", "the"], "return_text": True}
    ranks = service.post("/rerank", body)
    instance = {"type": "rerank", "query": "the", "texts": ["of", "the"], "their": 1}
    request = {"instances": [instance], "parameters": {"return_text": True}, "mine": 1}
    for path in ("/vertex", PREDICT):
        response = service.post(path, request)
        assert predictions(response) == [ranks.json()]
        assert response.headers["x-ranked-by"] == "similarity"
        assert response.headers["x-warning"].count("ignored unknown fields") == 2
    for wrong, message in (
        ({"instances": [instance, instance]}, "instances has 2 instances; rerank takes one"),
        ({"instances": [instance | {"texts": ["of", ""]}]}, "instances[0].texts[1] is empty"),
        ({"instances": [{"type": "rerank", "query": "the"}]}, "instances.0.texts: "),
        ({"instances": [instance | {"model": "small"}]}, "instances[0].model is another model"),
    ):
        assert service.post(PREDICT, wrong).json()["error"].startswith(message)


@pytest.mark.parametrize(
    ("instance", "parameters", "message"),
    [
        ("the", {"normalize": 3}, "parameters.normalize: "),
        ({"inputs": "the", "normalize": 3}, {"dimensions": 2}, "instances.0.normalize: "),
        ("the", {"dimensions": 9}, "parameters.dimensions "),
        ({"inputs": "the", "dimensions": 9}, {"dimensions": 2}, "dimensions "),
        ("the [MASK]", {"top_k": "x"}, "parameters.top_k: "),
        ("the [MASK]", {"top_k": 9999}, "parameters.top_k "),
    ],
)
def test_a_refusal_names_a_parameter_where_it_stands(
    service: Service, instance: Any, parameters: dict[str, Any], message: str
) -> None:
    body = {"instances": [instance], "parameters": parameters}
    assert service.post("/vertex", body).json()["error"].startswith(message)


def test_a_model_that_only_classifies_classifies(tmp_path: Path) -> None:
    with Service(tmp_path, (EMBEDDER, CLASSIFIER)) as service:
        found = predictions(service.post("/v1/models/classes:predict", {"instances": ["the"]}))
        assert [row["label"] for row in found[0][0]] == ["a", "b", "d", "c"]
        small = service.post("/v1/models/small:predict", {"instances": ["the"]})
        assert predictions(small) == [[[0.6, 0, 0.8, 0]]]


@pytest.mark.parametrize(
    ("instances", "message"),
    [
        ([], "instances is an empty list"),
        ([{}], 'instances[0] has no field "inputs"'),
        (["the", {"inputs": PAIR}], "instances[0] is for embed, and another one for qa"),
        (["the", "[MASK]"], "instances[0].inputs holds no mask token"),
        (["the", {"inputs": ["of", ""]}], "instances[1].inputs[1] is empty"),
        (["the", {"inputs": []}], "instances[1].inputs is an empty list"),
        (["the", {"inputs": ["of", 7]}], "instances.1.inputs"),
        (["the", {"inputs": "of", "normalize": False}], "instances[1] has other fields"),
        ([{"inputs": SENTENCES}] * 2, "instances has 2 instances; similarity takes one"),
        ([{"inputs": "the", "type": "fly"}], "instances[0].type is none of the types fill-mask"),
        (["the"] * 3 + [[1.5]], "instances has 4 texts; the limit is 3"),
        ([1, 2], "instances[0] is a number"),
        (["the"] * 301, "instances has 301 texts; the limit is 300"),
        ([{"inputs": "the", "model": "small"}], "instances[0].model is another model"),
    ],
)
def test_a_refusal_names_the_instance(service: Service, instances: Any, message: str) -> None:
    response = service.post(PREDICT, {"instances": instances})
    assert response.status_code in (400, 422)
    assert response.json()["error"].startswith(message)


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


def test_errors_of_a_model_are_those_of_kserve(service: Service) -> None:
    unknown = service.post("/v1/models/nobody:predict", {"instances": ["the"]})
    assert unknown.status_code == 404
    assert unknown.json()["error"].startswith("no model 'nobody' is served")
    assert "message" in service.get("/v1/models/nobody").json()["error"], "OpenAI's shape"
    assert len(service.post(f"/v1/models/{'a' * 3000}", {}).content) < 500
    model = service.get("/v1/models/tiny").json()
    assert model.items() >= {"name": "tiny", "ready": True, "object": "model"}.items()
    service.state.draining = True
    assert service.get("/v1/models/tiny").status_code == 503
    service.state.draining = False
    assert MAX_TEXTS == 3
