"""The OpenAPI document of all protocols: what it says of each route, and that answers have it."""

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from cloze.service.http.pages import document
from tests.unit.service.protocols.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("bundle")) as made:
        yield made


@pytest.fixture(scope="module")
def described(service: Service) -> dict[str, Any]:
    return document("Cloze", "1", "a server", service.routes)


OBJECT = {"source_sentence": "a", "sentences": ["b"]}
TEXT = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}
COHERE = {"texts": ["a", "b"], "model": "tiny", "input_type": "search_query"}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/fill-mask", {"inputs": "a [MASK]"}),
        ("POST", "/score", {"inputs": "a"}),
        ("POST", "/embed", {"inputs": "a"}),
        ("POST", "/embed", {"inputs": "a", "return_usage": True}),
        ("POST", "/embed_all", {"inputs": ["a", "b"]}),
        ("POST", "/similarity", {"inputs": OBJECT}),
        ("POST", "/nsp", {"inputs": {"text": "a", "next": "b"}}),
        ("POST", "/qa", {"inputs": {"question": "a", "context": "b"}}),
        ("POST", "/classify", {"inputs": "a"}),
        ("POST", "/token-classification", {"inputs": "a"}),
        ("POST", "/", {"inputs": "a"}),
        ("POST", "/predict", {"inputs": [["a"]]}),
        ("POST", "/rerank", {"query": "a", "texts": ["b"], "return_text": True}),
        ("POST", "/tokenize", {"inputs": "a", "other": 1}),
        ("POST", "/decode", {"ids": [5]}),
        ("POST", "/v1/embeddings", {"input": "a", "model": "tiny", "encoding_format": "base64"}),
        ("POST", "/v2/models/{model}/infer", {"inputs": [TEXT], "id": "x"}),
        ("POST", "/v2/embed", COHERE | {"embedding_types": ["base64", "binary", "ubinary"]}),
        ("POST", "/embed", {}),
        ("POST", "/v1/embeddings", {}),
        ("POST", "/v2/embed", {}),
        ("POST", "/v2/models/{model}/infer", {}),
        ("POST", "/admin/reload", None),
        ("GET", "/healthz", None),
        ("GET", "/readyz", None),
        ("GET", "/info", None),
        ("GET", "/", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/{model}", None),
        ("GET", "/v2", None),
        ("GET", "/v2/health/live", None),
        ("GET", "/v2/health/ready", None),
        ("GET", "/v2/models", None),
        ("GET", "/v2/models/{model}", None),
        ("GET", "/v2/models/{model}/ready", None),
    ],
)
def test_answers_are_as_documented(
    service: Service, described: dict[str, Any], method: str, path: str, body: Any
) -> None:
    name = "tiny" if path.startswith("/v1") else "tiny.embed"
    response = service.ask(method, path.replace("{model}", name), json=body)
    operation = described["paths"][path][method.lower()]
    documented = operation["responses"][str(response.status_code)]
    standard = {"content-type", "content-length"}
    assert response.headers.keys() - standard <= documented["headers"].keys()
    kind = response.headers["content-type"].partition(";")[0]
    schema = documented["content"][kind]["schema"] | {"components": described["components"]}
    if kind == "application/json":
        jsonschema.validate(response.json(), schema)
    if body:
        request = operation["requestBody"]["content"]["application/json"]["schema"]
        jsonschema.validate(body, request | {"components": described["components"]})
    if response.status_code == 200 and kind == "application/json" and "$ref" in schema:
        known = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
        assert response.json().keys() <= known.keys()
