"""Text classification: answers are those of transformers' pipeline, whatever the problem type."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient
from transformers import (
    AutoTokenizer,
    BertForSequenceClassification,
    DistilBertForSequenceClassification,
    TextClassificationPipeline,
)

from cloze.export.publish import export
from cloze.model_store import Store
from tests.support import tiny
from tests.support.serving import Server, running_server

LABELS = {0: "bad", 1: "fair", 2: "good"}
TEXTS = ["paris is red", "the water of the house", "walk", "year time door green " * 60]
PAIRS = [("paris is red", "the house"), ("red " * 120, "green " * 130)]

MULTI = {"id2label": LABELS, "problem_type": "multi_label_classification"}
KINDS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "single": (BertForSequenceClassification, "bert", {"id2label": LABELS}),
    "multi": (DistilBertForSequenceClassification, "distilbert", MULTI),
    "regression": (BertForSequenceClassification, "bert", {"num_labels": 1, "problem_type": "regression"}),
    "one-label": (DistilBertForSequenceClassification, "distilbert", {"num_labels": 1}),
}  # fmt: skip


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("classifiers")
    for kind, (model, family, _) in KINDS.items():
        tiny.CLASSES[f"{family}-{kind}"] = model
    return {
        kind: tiny.save_checkpoint(root / kind, f"{family}-{kind}", **sizes)
        for kind, (_, family, sizes) in KINDS.items()
    }


@pytest.fixture(scope="module")
def classifier_store(
    tmp_path_factory: pytest.TempPathFactory, classifiers: dict[str, Path]
) -> Path:
    root = tmp_path_factory.mktemp("store")
    for kind, checkpoint in classifiers.items():
        export(str(checkpoint), kind, Store(root))
    return root


@pytest.fixture(scope="module")
def server(classifier_store: Path) -> Iterator[Server]:
    with running_server(classifier_store, "--precision", "fp32") as server:
        yield server


def oracle(checkpoint: Path) -> TextClassificationPipeline:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, model_max_length=160)
        model = KINDS[checkpoint.name][0].from_pretrained(checkpoint)
        return TextClassificationPipeline(model=model, tokenizer=tokenizer, device="cpu")


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert [row["label"] for row in ours] == [row["label"] for row in theirs]
    assert [row["score"] for row in ours] == pytest.approx(
        [row["score"] for row in theirs], abs=1e-4
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "parameters",
    [{}, {"top_k": 2}, {"function_to_apply": "sigmoid"}, {"function_to_apply": "none"}],
)
def test_answers_are_those_of_transformers(
    server: Server, classifiers: dict[str, Path], kind: str, parameters: dict[str, Any]
) -> None:
    pipeline = oracle(classifiers[kind])
    theirs = {"top_k": None} | parameters
    inputs: list[Any] = [*TEXTS, *({"text": a, "text_pair": b} for a, b in PAIRS)]
    body = {"inputs": inputs, "parameters": parameters, "model": kind}
    response = httpx.post(f"{server.url}/classify", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-truncated"] == "2"  # the long text, and the long pair
    for text, ours in zip(inputs, response.json(), strict=True):
        same(ours, pipeline(text, truncation=True, **theirs))


@pytest.mark.parametrize("by", ["route", "base"])
def test_huggingface_client_classifies_texts(server: Server, by: str) -> None:
    addresses = {"route": {"model": f"{server.url}/classify"}, "base": {"base_url": server.url}}
    client = InferenceClient(**addresses[by], timeout=30)
    labels = client.text_classification(TEXTS[0])
    expected = httpx.post(f"{server.url}/classify", json={"inputs": TEXTS[0]}).json()[0]
    assert [(label.label, label.score) for label in labels] == [
        (label["label"], label["score"]) for label in expected
    ]
