"""Reranking and scores in the shapes of Cohere, Jina, Voyage, Infinity, vLLM, NVIDIA, Weaviate."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import ArrayResult
from tests.support.route_service import OneLabel, Service

TEXTS = ["the door", "the", "the door of the king"]
"""A longer text has a higher score by `OneLabel`: the order is 2, 0, 1."""

BODY: dict[str, Any] = {"query": "king", "documents": TEXTS}
LOGITS = [9.0, 6.0, 5.0]
SCORES = [1 / (1 + np.exp(-logit)) for logit in LOGITS]


class TwoLabels(OneLabel):
    """Has two logits: 1, and the length of the sequence."""

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        rows = [np.array([1, len(encoding)], np.float32) for encoding in batch]
        return [{"sequence_classification": ArrayResult(row)} for row in rows]


def serving(folder: Path, engine: OneLabel, *labels: str, **section: Any) -> Service:
    """Return a service of `tiny`, which embeds, and of a classifier with an engine."""
    head = {"labels": labels, "problem_type": "single_label_classification"} | section
    heads = {"sequence_classification": head}
    one = {"name": "rank", "tasks": ("text-classification",), "embedding": None, "heads": heads}
    service = Service(folder, ({}, one))
    service.queues[1]._engine = engine  # type: ignore[attr-defined]
    return service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(tmp_path_factory.mktemp("bundle"), OneLabel(), "relevance") as made:
        yield made


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_the_answer_has_what_each_client_reads(service: Service, path: str) -> None:
    response = service.post(path, BODY | {"model": "rank", "top_n": 2, "rank_fields": ["text"]})
    answer = ok(response)
    assert response.headers["x-warning"] == "ignored unknown fields: rank_fields"
    assert response.headers["x-ranked-by"] == "classifier"
    assert [row["index"] for row in answer["results"]] == [2, 0]
    assert [row["relevance_score"] for row in answer["results"]] == pytest.approx(SCORES[:2])
    assert answer["model"] == "rank"
    assert answer["usage"] == {"prompt_tokens": 20, "total_tokens": 20}
    assert answer["tokens"] == answer["meta"]["tokens"] == {"input_tokens": 20, "output_tokens": 0}
    assert answer["id"]
    documents = [row.get("document") for row in answer["results"]]
    repeated = [{"text": TEXTS[2]}, {"text": TEXTS[0]}]
    assert documents == ([None, None] if path == "/v2/rerank" else repeated)
    asked = ok(service.post(path, BODY | {"return_documents": "true"}))
    assert asked["model"] == "rank@3", "the default model has a name"
    documents = [row["document"] for row in asked["results"]][:2]
    assert documents == ([TEXTS[2], TEXTS[0]] if path == "/rerank" else repeated)
    for value in (0, "yes"):
        assert service.post(path, BODY | {"return_documents": value}).status_code in (400, 422)
    without = ok(service.post(path, BODY | {"return_documents": False, "model": None}))
    assert "document" not in without["results"][0]
    assert ("scores" in asked, "scores" in without) == (path == "/rerank", False)


def test_each_client_has_fields_of_its_own(service: Service) -> None:
    voyage = BODY | {"model": "rank", "top_k": 1, "truncation": True}
    assert [row["index"] for row in ok(service.post("/v1/rerank", voyage))["data"]] == [2]
    infinity = BODY | {"model": "default/not-specified", "raw_scores": True}
    answer = ok(service.post("/rerank", infinity))
    assert [row["relevance_score"] for row in answer["results"]] == LOGITS
    assert answer["model"] == "rank@3"
    vllm = ok(service.post("/v1/rerank", BODY | {"use_activation": False, "top_n": 0}))
    assert [row["relevance_score"] for row in vllm["results"]] == LOGITS
    weaviate = ok(service.post("/rerank", BODY | {"property": ""}))
    assert weaviate["query"] == "king"
    assert [row["document"] for row in weaviate["scores"]] == TEXTS
    assert [row["score"] for row in weaviate["scores"]] == pytest.approx(
        [SCORES[1], SCORES[2], SCORES[0]]
    )
    documents = [{"text": text, "title": "a"} for text in TEXTS]
    assert ok(service.post("/v1/rerank", BODY | {"documents": documents}))["results"][0][
        "document"
    ] == {"text": TEXTS[2]}
    by_cosine = service.post("/v1/rerank", BODY | {"model": "tiny"})
    assert by_cosine.headers["x-ranked-by"] == "similarity"
    body = {"query": {"text": "king"}, "passages": [{"text": text} for text in TEXTS]}
    nvidia = ok(service.post("/v1/ranking", body | {"model": "rank", "truncate": "END"}))
    assert nvidia["rankings"] == [
        {"index": index, "logit": logit} for index, logit in zip((2, 0, 1), LOGITS, strict=True)
    ]
    named = ok(service.post("/v1/retrieval/rank/reranking", body | {"top_k": 2}))
    assert named["rankings"] == nvidia["rankings"][:2]
    for name in ("nobody", "nvidia/nobody"):
        missing = service.post(f"/v1/retrieval/{name}/reranking", body)
        assert missing.status_code == 404
        assert f"no model '{name}' is served" in missing.json()["error"]["message"]
    voyage = BODY | {"top_k": None, "return_documents": True}
    found = ok(service.post("/v1/rerank", voyage))["data"]
    assert [row["document"] for row in found] == [TEXTS[2], TEXTS[0], TEXTS[1]]


def test_documents_are_cut_to_their_first_tokens(service: Service) -> None:
    body = BODY | {"max_tokens_per_doc": 2, "raw_scores": True}
    response = service.post("/v1/rerank", body)
    scores = {row["index"]: row["relevance_score"] for row in ok(response)["results"]}
    assert scores == {0: 6, 1: 5, 2: 6}
    assert response.headers["x-truncated"] == "1"


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score", "/v1/classify", "/v1/embeddings"])
def test_a_request_limits_the_tokens_of_its_texts(service: Service, path: str) -> None:
    """As vLLM's tests ask for: with the special tokens, and at most what the model reads."""
    text = "a " * 99
    pair = {"query": "king", "queries": "king", "documents": [text]}
    fields = {"/v1/rerank": ("query", "documents"), "/v1/score": ("queries", "documents")}
    one = {"input": text, "model": "tiny"}
    body = {name: pair[name] for name in fields[path]} if path in fields else one
    full = ok(service.post(path, body))["usage"]["prompt_tokens"]
    for most, used in ((8, 8), (-1, full), (None, full), (full, full)):
        response = service.post(path, body | {"truncate_prompt_tokens": most})
        assert ok(response)["usage"]["prompt_tokens"] == used
        assert (response.headers["x-truncated"], "x-warning" in response.headers) == ("1", False)
    for most in (0, -2, 4, full + 1):
        refused = service.post(path, body | {"truncate_prompt_tokens": most})
        assert refused.status_code == 400
        message = f"truncate_prompt_tokens must be -1 or 5 to {full}, which is what the model reads"
        assert refused.json()["error"]["message"] == f"{message}, got {most}"


def test_the_fields_decide_between_protocols_of_one_path(service: Service) -> None:
    own = ok(service.post("/rerank", {"query": "king", "texts": TEXTS, "return_text": True}))
    assert own[0] == {"index": 2, "score": pytest.approx(SCORES[0]), "text": TEXTS[2]}
    for path, body, fields in (
        ("/rerank", {"query": "king"}, "none of texts, documents;"),
        ("/rerank", BODY | {"texts": TEXTS}, "texts and documents,"),
        ("/score", {"model": "tiny"}, "none of inputs, queries, documents,"),
        ("/classify", {"inputs": "a", "input": "a"}, "inputs and input,"),
    ):
        refused = service.post(path, body)
        assert refused.status_code == 422
        assert f"the request has {fields}" in refused.json()["error"]
    assert ok(service.post("/score", {"inputs": "the king"}))["tokens"]
    assert len(ok(service.post("/classify", {"inputs": "a", "model": "tiny"}))[0]) == 4


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_pairs(service: Service, path: str) -> None:
    one = {"queries": "king", "documents": TEXTS, "use_activation": False, "model": "rank"}
    answer = ok(service.post(path, one))
    rows = [(row["index"], row["object"], row["score"]) for row in answer["data"]]
    assert rows == [(0, "score", 6), (1, "score", 5), (2, "score", 9)]
    assert (answer["object"], answer["model"]) == ("list", "rank")
    assert answer["usage"]["total_tokens"] == 20
    pair = {"text_1": "king", "text_2": "the"}
    assert [row["score"] for row in ok(service.post(path, pair))["data"]] == [
        pytest.approx(SCORES[2])
    ]
    for first, second in (("queries", "items"), ("data_1", "data_2")):
        body = {first: ["the king", "king"], second: ["the", "the door"], "use_activation": False}
        assert [row["score"] for row in ok(service.post(path, body))["data"]] == [6, 6]
    similar = {"queries": ["the", "the king"], "documents": ["the", "the"], "model": "tiny"}
    scores = [row["score"] for row in ok(service.post(path, similar))["data"]]
    ranked = [
        ok(service.post("/rerank", {"query": q, "texts": ["the"], "model": "tiny"}))[0]["score"]
        for q in similar["queries"]
    ]
    assert scores == pytest.approx(ranked)


def test_labels_of_texts(service: Service) -> None:
    body = {"input": ["a b", "c"], "model": "tiny"}
    for path in ("/classify", "/v1/classify"):
        answer = ok(service.post(path, body | {"use_activation": False}))
        assert answer["data"][0]["probs"] == [4, 3, 0, 2], "in the model's order"
        assert [(row["index"], row["num_classes"]) for row in answer["data"]] == [(0, 4), (1, 4)]
        assert answer["object"] == "list"
        rows = ok(service.post(path, body | {"raw_scores": True}))["data"]
        assert [label["score"] for label in rows[0]] == [4, 3, 2, 0], "best first"
        assert rows[0][0]["label"] == answer["data"][0]["label"]


def test_errors_have_the_shape_of_their_clients(service: Service) -> None:
    texts = {"queries": ["a", "b"], "documents": ["a", "b"]}
    for path, body, status, message in (
        ("/v1/rerank", BODY | {"top_n": -1}, 400, "top_n must be at least 0, got -1"),
        ("/v1/rerank", BODY | {"documents": ["a", ""]}, 400, "documents[1] is empty"),
        ("/v2/rerank", BODY | {"documents": ["a"] * 301}, 400, "has 301 texts; the limit is 300"),
        ("/v1/rerank", BODY | {"model": "gone"}, 404, "no model 'gone' is served"),
        ("/v1/rerank", BODY | {"documents": [{"title": "a"}]}, 400, "text"),
        ("/v1/score", texts | {"queries": ["a", "b", "c"]}, 400, "queries has 3 texts"),
        ("/v1/score", texts | {"queries": ["a", ""]}, 400, "queries[1] is empty"),
        ("/v1/score", texts | {"text_1": "a"}, 400, "it needs one of queries with documents"),
        ("/v1/classify", {"input": []}, 400, "input is an empty list"),
        ("/v1/ranking", {"query": {"text": ""}, "passages": [{"text": "a"}]}, 400, "query.text is"),
        (
            "/v1/ranking",
            {"query": {"text": "a"}, "passages": [{"text": ""}]},
            400,
            "passages[0].text is",
        ),
        (
            "/v1/ranking",
            {"query": {"text": "a"}, "passages": [{"image": ""}]},
            400,
            "passages.0.image",
        ),
    ):
        refused = service.post(path, body)
        assert refused.status_code == status, refused.text
        assert message in refused.json()["error"]["message"]
        assert refused.json()["detail"] == refused.json()["error"]["message"]
        if "rerank" in path:
            assert refused.json()["message"] == refused.json()["detail"]
    for path, body in (("/rerank", BODY | {"top_n": -1}), ("/classify", {"input": ""})):
        error = service.post(path, body).json()
        assert error["error"] == error["message"] == error["detail"]


def test_a_reranker_of_two_labels_scores_by_the_second(tmp_path: Path) -> None:
    for reranks, by in ((True, "classifier"), (None, "similarity")):
        with serving(tmp_path, TwoLabels(), "no", "yes", reranks=reranks) as service:
            assert service.post("/v1/rerank", BODY).headers["x-ranked-by"] == by
    with serving(tmp_path, TwoLabels(), "no", "yes", reranks=True) as service:
        rows = ok(service.post("/v1/rerank", BODY))["results"]
        assert [row["index"] for row in rows] == [2, 0, 1]
        softmax = [np.exp(logit) / (np.exp(logit) + np.exp(1)) for logit in LOGITS]
        assert [row["relevance_score"] for row in rows] == pytest.approx(softmax)
        raw = ok(service.post("/v1/rerank", BODY | {"raw_scores": True}))["results"]
        assert [row["relevance_score"] for row in raw] == [8, 5, 4]
        labels = ok(service.post("/classify", {"inputs": "the", "model": "rank"}))
        assert [row["label"] for row in labels[0]] == ["yes", "no"]
