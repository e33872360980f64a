"""The recipes of docs/clients.md: what databases and tools post on their first call, and read.

The bodies follow the public documentation of each API. The page names the address of each row, so
a recipe without a test, or a test without a recipe, fails.
"""

import re
import struct
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.route_service import Service

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
SECTION = PAGE.partition("\n## Databases, clouds and tools\n")[2].partition("\n## ")[0]
RECIPES = dict(re.findall(r"^### (.+)\n([\s\S]+?)(?=^### |\Z)", SECTION, re.MULTILINE))
RUN = {"Java", "Semantic Kernel", "LiteLLM", "Qdrant", "Chroma"}
"""Recipes whose released packages run in tests/system/test_recipes.py."""

TEXTS = ["the", "a b"]
VECTORS = [[0.6, 0, 0.8, 0], [0, 0, 1, 0]]
MODEL = {"model": "tiny"}
RANK = {"query": "the", "documents": ["the", "a b"]}
TEI_RANK = {"query": "the", "texts": ["the", "a b"]}

Read = Callable[[Any], Any]


def rows(answer: Any) -> Any:
    """Return the vectors of OpenAI's shape, in the order of their index."""
    assert answer["usage"]["total_tokens"] > 0
    return [row["embedding"] for row in sorted(answer["data"], key=lambda row: row["index"])]


def base64_rows(answer: Any) -> Any:
    return [struct.unpack("<4f", b64decode(row)) for row in rows(answer)]


def ranks(key: str = "results", score: str = "relevance_score") -> Read:
    """Return a reader of an answer that ranks: the indexes, best first."""

    def read(answer: Any) -> list[int]:
        found = answer[key] if key else answer
        scores = [row[score] for row in found]
        assert scores == sorted(scores, reverse=True)
        return [row["index"] for row in found]

    return read


def documents(answer: Any) -> list[str]:
    return [row["document"]["text"] for row in answer["results"]]


def cohere_floats(answer: Any) -> Any:
    return answer["embeddings"]["float"]


class Call(NamedTuple):
    """A request of a client, and what it reads from the answer.

    Attributes:
        address: what the user of the client configures.
        path: what the client appends.
    """

    client: str
    address: str
    path: str
    body: dict[str, Any]
    read: Read
    expected: Any = VECTORS


OPENAI = {"input": TEXTS} | MODEL
COHERE = {"texts": TEXTS, "input_type": "search_document"} | MODEL
BEST = [1, 0]

CALLS = [
    Call("Elasticsearch", "/v1/embeddings", "", OPENAI | {"user": "me"}, rows),
    Call("Elasticsearch", "/embed", "", {"inputs": TEXTS}, lambda answer: answer),
    Call("Elasticsearch", "/v1/rerank", "", RANK, ranks(), BEST),
    Call("Elasticsearch", "/rerank", "", TEI_RANK | {"return_text": True, "top_n": 2},
         ranks("", "score"), BEST),
    Call("OpenSearch", "/v1/embeddings", "", OPENAI, rows),
    Call("OpenSearch", "/v1/embed", "", COHERE | {"truncate": "END"},
         lambda answer: answer["embeddings"]),
    Call("OpenSearch", "/v2/embed", "", COHERE | {"embedding_types": ["float"]}, cohere_floats),
    Call("OpenSearch", "/v2/rerank", "", RANK | MODEL | {"top_n": 2}, ranks(), BEST),
    Call("Milvus", "/v1/embeddings", "", OPENAI | {"encoding_format": "float"}, rows),
    Call("Milvus", "http://localhost:8000", "/embed",
         {"inputs": TEXTS, "truncate": True, "truncation_direction": "Right"},
         lambda answer: answer),
    Call("Milvus", "http://localhost:8000", "/rerank", TEI_RANK | {"truncate": True},
         ranks("", "score"), BEST),
    Call("Milvus", "/v2/embed", "",
         COHERE | {"embedding_types": ["float"], "truncate": "END"}, cohere_floats),
    Call("Milvus", "/v1/embeddings", "",
         OPENAI | {"input_type": "document", "truncation": True, "output_dtype": "float"}, rows),
    Call("Milvus", "http://localhost:8000", "/v1/rerank",
         RANK | {"truncate_prompt_tokens": 10}, ranks(), BEST),
    Call("Dify", "http://localhost:8000/v1", "/embeddings",
         {"input": TEXTS[:1], "encoding_format": "float"} | MODEL, rows, VECTORS[:1]),
    Call("Dify", "http://localhost:8000/v1", "/rerank",
         RANK | MODEL | {"top_n": 2, "return_documents": True}, documents, ["a b", "the"]),
    Call("RAGFlow", "http://localhost:8000/v1", "/embeddings",
         OPENAI | {"encoding_format": "float", "drop_params": True}, rows),
    Call("RAGFlow", "http://localhost:8000/v1", "/rerank", RANK | MODEL | {"top_n": 2}, ranks(),
         BEST),
    Call("RAGFlow", "http://localhost:8000/v1", "/rerank",
         RANK | MODEL | {"return_documents": "true", "return_len": "true"}, ranks(), BEST),
    Call("Open WebUI", "http://localhost:8000/v1", "/embeddings", OPENAI, rows),
    Call("Open WebUI", "http://localhost:8000", "/api/embed", OPENAI,
         lambda answer: answer["embeddings"]),
    Call("Open WebUI", "/v1/rerank", "", RANK | MODEL | {"top_n": 2}, ranks(), BEST),
    Call("LightRAG", "http://localhost:8000/v1", "/embeddings",
         OPENAI | {"encoding_format": "base64"}, base64_rows),
    Call("LightRAG", "/v1/embeddings", "",
         OPENAI | {"task": "text-matching", "dimensions": 4, "embedding_type": "base64"},
         base64_rows),
    Call("LightRAG", "/v1/rerank", "", RANK | MODEL | {"return_documents": False}, ranks(), BEST),
    Call("mem0", "http://localhost:8000/v1", "/embeddings",
         OPENAI | {"encoding_format": "base64", "dimensions": 4}, base64_rows),
    Call("mem0", "http://localhost:8000", "/api/embed", OPENAI,
         lambda answer: answer["embeddings"]),
    Call("n8n", "http://localhost:8000/v1", "/embeddings",
         OPENAI | {"encoding_format": "base64"}, base64_rows),
    Call("n8n", "http://localhost:8000", "/api/embed",
         OPENAI | {"truncate": True, "keep_alive": "5m", "options": {"num_ctx": 2048}},
         lambda answer: answer["embeddings"]),
    Call("AnythingLLM", "http://localhost:8000/v1", "/embeddings",
         OPENAI | {"encoding_format": "base64"}, base64_rows),
    Call("AnythingLLM", "http://localhost:8000", "/api/embeddings",
         MODEL | {"prompt": "the", "options": {"num_ctx": 512}},
         lambda answer: answer["embedding"], VECTORS[0]),
    Call("SageMaker", "/invocations", "", {"inputs": TEXTS}, lambda answer: answer),
    Call("SageMaker", "/invocations", "", OPENAI, rows),
    Call("Vertex AI", "/vertex", "", {"instances": [{"inputs": text} for text in TEXTS]},
         lambda answer: [row[0] for row in answer["predictions"]]),
    Call("Weaviate", "http://localhost:8000", "/vectors",
         {"text": "the", "config": {"pooling_strategy": "masked_mean"}},
         lambda answer: [answer["vector"]], VECTORS[:1]),
]  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("models"), [{"name": "tiny"}]) as service:
        yield service


@pytest.mark.parametrize(
    "call", CALLS, ids=[f"{call.client}-{call.path or call.address}" for call in CALLS]
)
def test_a_client_reads_its_first_answer(service: Service, call: Call) -> None:
    path = call.address.removeprefix("http://localhost:8000") + call.path
    response = service.post(path, call.body)
    assert response.status_code == 200, response.text
    found = call.read(response.json())
    if isinstance(found[0], str | int):
        assert found == call.expected
    else:
        for vector, expected in zip(found, call.expected, strict=True):
            assert vector == pytest.approx(expected, abs=1e-6)


def test_every_recipe_has_its_address_and_a_test() -> None:
    assert {call.client for call in CALLS} | RUN == RECIPES.keys()
    for call in CALLS:
        assert call.address in RECIPES[call.client], call
