"""Ollama's protocol: what its clients send, and what they read."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest

from tests.support.route_service import Service

EMBEDDER = {"name": "small", "version": 1, "tasks": ("embed",), "heads": {}}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    models = ({}, EMBEDDER, {"version": 2})
    aliases = {"nomic-embed-text": "small", "all-minilm:33m": "small"}
    with Service(tmp_path_factory.mktemp("bundle"), models, aliases=aliases) as made:
        yield made


@pytest.mark.parametrize(
    "name",
    ["small", "small:latest", "small@1", "nomic-embed-text", "nomic-embed-text:latest", "all-minilm:33m"],
)  # fmt: skip
def test_vectors_in_ollama_s_shape(service: Service, name: str) -> None:
    answer = service.post("/api/embed", {"model": name, "input": ["the", "the king"]}).json()
    seconds = service.seen.tokenize_s + service.seen.queue_s + service.seen.inference_s
    assert answer == {
        "model": name,
        "embeddings": [pytest.approx([0.6, 0, 0.8, 0]), [0, 0, 1, 0]],
        "total_duration": int(1e9 * seconds),
        "load_duration": 0,
        "prompt_eval_count": 7,
    }
    old = service.post("/api/embeddings", {"model": name, "prompt": "the king"})
    assert old.json() == {"embedding": [0, 0, 1, 0]}


def test_what_ollama_s_clients_send_beside_a_text(service: Service) -> None:
    body = {"model": "small", "input": "the", "options": {"num_ctx": 8}, "keep_alive": "5m"}
    response = service.post("/api/embed", body | {"truncate": None, "dimensions": 0})
    assert len(response.json()["embeddings"][0]) == 4
    assert response.headers["x-warning"] == "ignored unknown fields: options, keep_alive"
    cut = service.post("/api/embed", body | {"dimensions": 2}).json()
    assert cut["embeddings"] == [[1, 0]]
    assert service.post("/api/embed", {"input": "the"}).json()["model"] == "tiny@3"


@pytest.mark.parametrize("empty", ["", []])
def test_a_request_without_texts_has_no_vectors(service: Service, empty: Any) -> None:
    answer = service.post("/api/embed", {"model": "small", "input": empty}).json()
    assert (answer["embeddings"], answer["prompt_eval_count"]) == ([], 0)
    old = service.post("/api/embeddings", {"model": "small", "prompt": ""})
    assert old.json() == {"embedding": []}


def test_what_ollama_s_clients_are_told_of_models(service: Service) -> None:
    rows = service.get("/api/tags").json()["models"]
    names = ["tiny:latest", "small:latest", "nomic-embed-text:latest", "all-minilm:33m"]
    assert [row["name"] for row in rows] == [row["model"] for row in rows] == names
    row = rows[1]
    assert (row["size"], len(row["digest"])) == (3, 64)
    assert row["modified_at"] == "2026-01-01T00:00:00+00:00"
    running = service.get("/api/ps").json()["models"]
    assert running[1].items() > row.items()
    assert [model["context_length"] for model in running] == [12, 12, 12]
    shown = service.post("/api/show", {"model": "nomic-embed-text", "verbose": True}).json()
    assert shown == service.post("/api/show", {"name": "small:latest"}).json()
    assert shown["details"] == row["details"] == {
        "parent_model": "", "format": "onnx", "family": "bert", "families": ["bert"],
        "parameter_size": "0.00M", "quantization_level": "FP32",
    }  # fmt: skip
    assert shown["capabilities"] == ["embedding"]
    assert shown["model_info"] == {
        "general.architecture": "bert", "general.parameter_count": 100, "bert.block_count": 4,
        "bert.context_length": 12, "bert.embedding_length": 4,
    }  # fmt: skip
    assert service.get("/api/version").json() == {"version": version("cloze-server")}
