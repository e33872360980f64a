"""Reranking and scores in the shapes of Cohere, Jina, Voyage, Infinity, vLLM, NVIDIA, Weaviate."""

from collections.abc import Sequence
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


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


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
