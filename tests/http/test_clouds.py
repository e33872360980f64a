"""Vertex AI's and KServe's instances, and what SageMaker asks of a container."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from cloze.image import arguments
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


def test_invocations_have_the_headers_of_sagemaker(service: Service) -> None:
    """`recipes.txt` has an invocation of each route."""
    attributes = {"x_amzn_sagemaker_custom_attributes": "c000b4f9", "content_type": "text/csv"}
    answer = service.post("/invocations", {"inputs": "the"}, **attributes)
    assert answer.json() == [pytest.approx([0.6, 0, 0.8, 0])]
    vectors = service.post("/invocations", {"inputs": "the"}, accept="application/octet-stream")
    assert vectors.headers["x-shape"] == "1,4"


def test_the_image_serves_as_it_is_started(tmp_path: Path) -> None:
    """Each cloud's way to start it; without one, and with arguments, as `cloze serve` does."""

    def started(*given: str, **environment: str) -> tuple[list[str], dict[str, str]]:
        return arguments(given, environment, tmp_path / "model"), environment

    assert started() == (["serve"], {})
    assert started("serve", "--port", "9") == (["serve", "--port", "9"], {})
    assert started("--version") == (["--version"], {})
    assert started("serve") == (["serve"], {"CLOZE_PORT": "8080"})
    assert started("serve", CLOZE_PORT="9")[1]["CLOZE_PORT"] == "9"
    asked = {"SAGEMAKER_BIND_TO_PORT": "7", "CLOZE_PORT": "9"}
    assert started("serve", **asked)[1]["CLOZE_PORT"] == "7"
    vertex = {"AIP_HTTP_PORT": "8", "AIP_HEALTH_ROUTE": "/h", "AIP_PREDICT_ROUTE": "/p"}
    own = {"CLOZE_PORT": "8", "CLOZE_HEALTH_ROUTE": "/h", "CLOZE_PREDICT_ROUTE": "/mine"}
    assert started(CLOZE_PREDICT_ROUTE="/mine", **vertex) == (["serve"], vertex | own)


def test_the_model_of_sagemaker_is_a_store_or_a_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, environment = tmp_path / "model", {"CLOZE_MODEL_STORE": "/bundles"}
    model.mkdir()
    arguments(["serve"], environment, model)
    assert environment["CLOZE_MODEL_STORE"] == "/bundles", "the folder is empty"
    (model / "mine" / "1").mkdir(parents=True)
    arguments(["serve"], environment, model)
    assert environment["CLOZE_MODEL_STORE"] == str(model)
    manifest = model / "manifest.json"
    manifest.write_text(json.dumps({"name": "mine", "version": 4}))
    arguments(["serve"], environment, model)
    bundle = Path(environment["CLOZE_MODEL_STORE"], "mine", "4")
    assert (bundle / "manifest.json").samefile(manifest)
    for wrong in ("{", "[]", '{"name": "../x", "version": 1}', '{"name": "x", "version": "y"}'):
        manifest.write_text(wrong)
        with pytest.raises(SystemExit) as ended:
            arguments(["serve"], environment, model)
        assert ended.value.code == 2
        assert str(manifest) in capsys.readouterr().err
