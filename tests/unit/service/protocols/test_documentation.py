"""The OpenAPI document of all protocols: what it says of each route, and that answers have it."""

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from cloze.model_store.locations import SHIPPED_NAMES
from cloze.service.http.pages import document
from cloze.service.protocols import PROTOCOLS
from cloze.service.tasks import TASKS
from tests.unit.service.protocols.service import Service

TIMES = {
    "x-compute-time", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time",
    "x-compute-tokens", "x-truncated", "x-score-kind", "x-warning", "x-model",
    "x-embedding-space",
}  # fmt: skip
VECTORS = {"x-dtype", "x-shape", "x-scale", "x-lengths"}
PAGE = {"cache-control", "content-security-policy", "referrer-policy", "x-content-type-options"}
BYTES = {"inference-header-content-length"}
HEADERS = {"": set(), "T": TIMES, "V": TIMES | VECTORS, "B": TIMES | BYTES, "P": PAGE}
HEADERS["R"] = TIMES | {"x-ranked-by"}

ALL = "400 401 403 404 408 409 412 413 415 422 424 429 499 500 503 504"
NO_422 = ALL.replace(" 422", "")
ERRORS = {"all": ALL, "no422": NO_422}
TYPES = {"json": "application/json", "raw": "application/octet-stream", "npy": "application/x-npy",
         "text": "text/plain", "html": "text/html"}  # fmt: skip

TABLE = """
POST /fill-mask | tasks | json | T | all
POST /score | tasks | json | T | all
POST /embed | tasks | json raw npy | V | all
POST /embed_all | tasks | json raw npy | V | all
POST /embed_sparse | tasks | json | T | all
POST /zero-shot-classification | tasks | json | T | all
POST /redact | tasks | json | T | all
POST /similarity | tasks | json | T | all
POST /nsp | tasks | json | T | all
POST /qa | tasks | json | T | all
POST /classify | tasks | json | T | all
POST /token-classification | tasks | json | T | all
POST / | tasks | json raw npy | V | all
GET / | service | html | P |
GET /healthz | service | json | | 503
GET /readyz | service | json | | 503
GET /health | service | | | 503
GET /info | service | json | |
GET /metrics | service | text | |
POST /admin/reload | service | json | | 401 403 409 503
POST /tokenize | text-embeddings-inference | json | T | all
POST /decode | text-embeddings-inference | json | T | all
POST /predict | text-embeddings-inference | json | T | all
POST /rerank | text-embeddings-inference | json | R | all
POST /v1/embeddings | OpenAI | json | T | no422
POST /embeddings | OpenAI | json | T | no422
GET /v1/models | OpenAI | json | |
GET /v1/models/{model} | OpenAI | json | | 404
GET /v2 | Open Inference Protocol | json | |
GET /v2/health/live | Open Inference Protocol | json | | 503
GET /v2/health/ready | Open Inference Protocol | json | | 503
GET /v2/models | Open Inference Protocol | json | |
GET /v2/models/{model} | Open Inference Protocol | json | | 404
GET /v2/models/{model}/ready | Open Inference Protocol | json | | 404 503
POST /v2/models/{model}/infer | Open Inference Protocol | json raw | B | no422
GET /v2/models/{model}/versions/{version} | Open Inference Protocol | json | | 404
GET /v2/models/{model}/versions/{version}/ready | Open Inference Protocol | json | | 404 503
POST /v2/models/{model}/versions/{version}/infer | Open Inference Protocol | json raw | B | no422
POST /v2/embed | Cohere | json | T | no422
"""
"""Route, group, media types of a result, its headers as in `HEADERS`, and statuses of errors."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("bundle")) as made:
        yield made


@pytest.fixture(scope="module")
def described(service: Service) -> dict[str, Any]:
    return document("Cloze", "1", "a server", service.routes)


def test_what_is_documented_of_each_route(described: dict[str, Any]) -> None:
    rows = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
    for route, group, types, headers, errors in rows:
        method, path = route.split()
        operation = described["paths"][path][method.lower()]
        responses = dict(operation["responses"])
        result = responses.pop("200")
        assert operation["tags"] == [group], route
        assert list(result.get("content", {})) == [TYPES[kind] for kind in types.split()], route
        assert result["headers"].keys() == HEADERS[headers] | {"x-request-id"}, route
        assert list(responses) == ERRORS.get(errors, errors).split(), route
        assert ("requestBody" in operation) == (headers in ("T", "V", "B", "R")), route
    documented = {
        f"{method.upper()} {path}"
        for path, operations in described["paths"].items()
        for method in operations
    }
    assert documented == {row[0] for row in rows}


def test_types_of_headers(described: dict[str, Any]) -> None:
    numbers = {"x-truncated", "inference-header-content-length", "retry-after", "retry-after-ms"}
    numbers |= {"x-compute-tokens"}
    numbers |= {name for name in TIMES if name.endswith("-time")}
    found: dict[str, set[str]] = {}
    for operations in described["paths"].values():
        for operation in operations.values():
            for response in operation["responses"].values():
                for name, header in response["headers"].items():
                    found.setdefault(name, set()).add(header["schema"]["type"])
    assert found == {
        name: {"integer" if name in numbers else "number" if name == "x-scale" else "string"}
        for name in found
    }
    assert {"x-scale", *numbers} <= found.keys()


def fields(described: dict[str, Any], name: str) -> str:
    """Return the fields of a schema, those that may be absent with their defaults."""
    schema = described["components"]["schemas"][name]
    required = schema.get("required", ())
    shown = [
        field if field in required else f"{field}={properties.get('default')}"
        for field, properties in schema["properties"].items()
    ]
    more = " ..." if schema.get("additionalProperties") else ""
    return " ".join(shown) + more


def test_fields_of_bodies(described: dict[str, Any]) -> None:
    cut = "truncate=None truncation_direction=None long_text=None"
    for name, expected in {
        "FillMaskBody": "inputs parameters=None model=None",
        "SimilarityBody": "inputs parameters=None model=None ...",
        "EmbedSparseBody": f"return_usage=None {cut} prompt_name=None input_type=None top_k=None "
        "return_tokens=None inputs model=None ...",
        "DispatchBody": "inputs parameters=None ...",
        "PredictBody": f"{cut} inputs raw_scores=False model=None ...",
        "RerankBody": f"query texts return_usage=None {cut} raw_scores=None return_text=False model=None ...",
        "TokenizeBody": "add_special_tokens=True prompt_name=None inputs model=None ...",
        "DecodeBody": "skip_special_tokens=True ids model=None ...",
        "OpenAiEmbeddingsBody": "input model encoding_format=None dimensions=None input_type=None "
        "truncate=None truncation=None output_dtype=None normalized=None user=None",
        "CohereEmbedBody": "model input_type texts=None inputs=None embedding_types=None "
        "output_dimension=None truncate=None priority=None",
        "InferBody": "inputs id=None outputs=None parameters=None",
        "InferInput": "name shape datatype parameters=None data=None",
        "InferOutput": "name parameters=None",
        "EmbedReport": "result usage",
    }.items():
        assert fields(described, name) == expected, name
    schemas = described["components"]["schemas"]
    assert schemas["InferInput"]["properties"]["datatype"]["const"] == "BYTES"
    pairs = schemas["PredictBody"]["properties"]["inputs"]["anyOf"]
    assert [(one.get("minItems"), one.get("maxItems")) for one in pairs] == [
        (None, None), (1, 2), (1, None),
    ]  # fmt: skip
    dimensions = schemas["OpenAiEmbeddingsBody"]["properties"]["dimensions"]["anyOf"]
    assert dimensions[0] == {"type": "integer", "minimum": 1}
    inputs = schemas["DispatchBody"]["properties"]["inputs"]
    assert (inputs["minItems"], inputs["minLength"]) == (1, 1)


def test_examples_have_titles(described: dict[str, Any]) -> None:
    titles = {
        path: list(body["content"]["application/json"].get("examples", ()))
        for path, operations in described["paths"].items()
        if (body := operations.get("post", {}).get("requestBody"))
    }
    assert all(titles.values())
    assert titles["/predict"] == ["One text", "A text and a pair"]
    assert titles["/rerank"] == titles["/v1/embeddings"] == ["Two texts"]
    assert [title.partition(": ")[0] for title in titles["/"]] == list(TASKS), "one per task"


def test_examples_fit_their_schemas(described: dict[str, Any]) -> None:
    for path, operations in described["paths"].items():
        if body := operations.get("post", {}).get("requestBody"):
            content = body["content"]["application/json"]
            for title, example in content["examples"].items():
                value = example["value"]
                schema = content["schema"] | {"components": described["components"]}
                jsonschema.validate(value, schema)
                known = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
                assert value.keys() <= known["properties"].keys() | {"parameters"}, (path, title)
                assert value.get("model", SHIPPED_NAMES[0]) in SHIPPED_NAMES


def test_paths_of_protocols() -> None:
    assert [protocol.prefixes for protocol in PROTOCOLS] == [
        ("/",),
        ("/predict", "/rerank", "/tokenize", "/decode"),
        ("/v1/", "/embeddings"),
        ("/v2",),
        ("/v2/embed",),
    ]


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
        ("POST", "/embed_sparse", {"inputs": "a"}),
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
        ("POST", "/v2/models/{model}/infer", {"inputs": [TEXT]}),
        ("POST", "/v2/models/{model}/infer", {"inputs": [TEXT], "id": "x"}),
        ("POST", "/v2/embed", COHERE),
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
