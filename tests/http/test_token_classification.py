"""Token classification: entities are those of transformers' pipeline, for every strategy."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient
from transformers import (
    AutoTokenizer,
    BertForTokenClassification,
    DistilBertForTokenClassification,
    TokenClassificationPipeline,
)

from cloze.export.publish import export
from cloze.model_store import Store
from tests.support import tiny
from tests.support.serving import Server, running_server

LABELS = dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "misc"]))
LIMIT = 160
TEXTS = [
    "paris is red, and the houses of france",
    "Walking timely doors: Ünknöwn 北京 waters!",
    "year time door green [MASK] answers " * 40,
]
MODELS = {
    "bert": BertForTokenClassification,
    "distilbert": DistilBertForTokenClassification,
}


@pytest.fixture(scope="module")
def taggers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("taggers")
    for family, model in MODELS.items():
        tiny.CLASSES[f"{family}-tagger"] = model
    return {
        family: tiny.save_checkpoint(root / family, f"{family}-tagger", id2label=LABELS)
        for family in MODELS
    }


@pytest.fixture(scope="module")
def tagger_store(tmp_path_factory: pytest.TempPathFactory, taggers: dict[str, Path]) -> Path:
    root = tmp_path_factory.mktemp("store")
    for family, checkpoint in taggers.items():
        export(str(checkpoint), family, Store(root))
    return root


@pytest.fixture(scope="module")
def server(tagger_store: Path) -> Iterator[Server]:
    with running_server(tagger_store, "--precision", "fp32") as server:
        yield server


def oracle(checkpoint: Path, family: str) -> TokenClassificationPipeline:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, model_max_length=LIMIT)
        model = MODELS[family].from_pretrained(checkpoint)
        return TokenClassificationPipeline(model=model, tokenizer=tokenizer, device="cpu")


def ask(server: Server, family: str, inputs: Any, **parameters: Any) -> httpx.Response:
    body = {"inputs": inputs, "model": family, "parameters": parameters}
    return httpx.post(f"{server.url}/token-classification", json=body)


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert one.pop("score") == pytest.approx(float(other.pop("score")), abs=1e-4)
        assert one == {
            key: getattr(value, "item", lambda v=value: v)() for key, value in other.items()
        }


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("ignored", [None, ["O", "misc"]])
def test_entities_are_those_of_transformers(
    server: Server, taggers: dict[str, Path], family: str, strategy: str, ignored: list[str] | None
) -> None:
    pipeline = oracle(taggers[family], family)
    extra = {} if ignored is None else {"ignore_labels": ignored}
    response = ask(server, family, TEXTS, aggregation_strategy=strategy, **extra)
    assert response.status_code == 200, response.text
    assert response.headers["x-truncated"] == "1"
    for text, ours in zip(TEXTS, response.json(), strict=True):
        same(ours, pipeline(text, aggregation_strategy=strategy, **extra))


@pytest.mark.parametrize("by", ["route", "base"])
def test_huggingface_client_tags_tokens(server: Server, by: str) -> None:
    route = f"{server.url}/token-classification"
    addresses = {"route": {"model": route}, "base": {"base_url": server.url}}
    client = InferenceClient(**addresses[by], timeout=30)
    found = client.token_classification(TEXTS[0], aggregation_strategy="simple")
    body = {"inputs": TEXTS[0], "parameters": {"aggregation_strategy": "simple"}}
    expected = httpx.post(route, json=body).json()
    assert [(entity.entity_group, entity.start, entity.score) for entity in found] == [
        (entity["entity_group"], entity["start"], entity["score"]) for entity in expected
    ]


@pytest.mark.parametrize("stride", [0, 100])
@pytest.mark.parametrize("strategy", ["simple", "average"])
def test_long_texts_in_windows_are_those_of_transformers(
    server: Server, taggers: dict[str, Path], stride: int, strategy: str
) -> None:
    pipeline = oracle(taggers["bert"], "bert")
    response = ask(server, "bert", TEXTS[2], aggregation_strategy=strategy, stride=stride)
    assert response.headers["x-truncated"] == "0"
    assert int(response.headers["x-compute-tokens"]) > LIMIT
    same(response.json(), pipeline(TEXTS[2], aggregation_strategy=strategy, stride=stride))
