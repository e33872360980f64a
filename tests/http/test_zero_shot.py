"""Zero-shot classification: the scores of transformers' pipeline, and what is refused."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from huggingface_hub import InferenceClient
from transformers import (
    AutoTokenizer,
    BertForSequenceClassification,
    DistilBertForSequenceClassification,
    ZeroShotClassificationPipeline,
)

from cloze.cli import cli
from cloze.client import Client
from cloze.export.publish import export
from cloze.model_store import Store
from tests.support import tiny
from tests.support.refusals import error_of
from tests.support.serving import Server, running_server

ROUTE = "/zero-shot-classification"
TEXTS = ["paris is red", "the water of the house", "year time door green " * 60]
LABELS = ["the door", "red", "a green moon over the sea", "walk"]
CLASSIFIERS: dict[str, tuple[Any, str, list[str]]] = {
    "last": (BertForSequenceClassification, "bert", ["contradiction", "neutral", "ENTAILMENT"]),
    "first": (BertForSequenceClassification, "bert", ["entailment", "neutral", "contradiction"]),
    "two": (DistilBertForSequenceClassification, "distilbert", ["not_entailment", "Entailed"]),
    "none": (BertForSequenceClassification, "bert", ["bad", "good"]),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    saved = {}
    for name, (model, family, labels) in CLASSIFIERS.items():
        tiny.CLASSES[f"{family}-nli-{name}"] = model
        ids = {
            "id2label": dict(enumerate(labels)),
            "label2id": {label: n for n, label in enumerate(labels)},
        }
        saved[name] = tiny.save_checkpoint(root / name, f"{family}-nli-{name}", **ids)
    return saved


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Path:
    root = tmp_path_factory.mktemp("store")
    for name in ("none", "last", "first", "two"):
        export(str(checkpoints[name]), name, Store(root))
    return root


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    models = [flag for name in ("none", "last", "first", "two") for flag in ("--model", name)]
    with running_server(store, *models, CLOZE_MAX_REQUEST_TOKENS="4000") as server:
        yield server


def ask(server: Server, inputs: Any, **parameters: Any) -> Any:
    model = parameters.pop("model", "last")
    body = {"inputs": inputs, "parameters": {"candidate_labels": LABELS} | parameters}
    return httpx.post(server.url + ROUTE, json=body | {"model": model}).json()


def oracle(checkpoint: Path) -> ZeroShotClassificationPipeline:
    model = CLASSIFIERS[checkpoint.name][0].from_pretrained(checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, model_max_length=160)
        return ZeroShotClassificationPipeline(model=model, tokenizer=tokenizer, device="cpu")


def same(ours: list[dict[str, Any]], theirs: dict[str, Any]) -> None:
    expected = dict(zip(theirs["labels"], theirs["scores"], strict=True))
    assert {row["label"]: row["score"] for row in ours} == pytest.approx(expected, abs=1e-5)
    scores = [row["score"] for row in ours]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("parameters", [
    {}, {"multi_label": True}, {"candidate_labels": ["red"]},
    {"hypothesis_template": "{} is the king of the house"},
])  # fmt: skip
@pytest.mark.parametrize("name", ["last", "first", "two"])
def test_scores_are_those_of_transformers(
    server: Server, checkpoints: dict[str, Path], name: str, parameters: dict[str, Any]
) -> None:
    pipeline, asked = oracle(checkpoints[name]), {"candidate_labels": LABELS} | parameters
    answers = ask(server, TEXTS, model=name, **asked)
    for text, answer in zip(TEXTS, answers, strict=True):
        same(answer, pipeline(text, **asked))


@pytest.mark.parametrize("path", ["", ROUTE])
def test_the_released_client_of_hugging_face_reads_the_answer(
    server: Server, checkpoints: dict[str, Path], path: str
) -> None:
    """The client names no model: the first that names an entailment answers."""
    theirs = oracle(checkpoints["last"])(TEXTS[0], candidate_labels=LABELS, multi_label=True)
    client = (
        InferenceClient(base_url=server.url) if not path else InferenceClient(server.url + path)
    )
    answer = client.zero_shot_classification(TEXTS[0], LABELS, multi_label=True)
    same([{"label": row.label, "score": row.score} for row in answer], theirs)


def test_every_way_to_ask_gives_the_same(server: Server) -> None:
    expected = ask(server, TEXTS[:2])
    with Client(server.url) as client:
        labels = client.zero_shot_classification(TEXTS[:2], LABELS)
    assert [[(one.label, one.score) for one in text] for text in labels] == [
        [(row["label"], row["score"]) for row in text] for text in expected
    ]
    flags = [flag for label in LABELS for flag in ("--label", label)]
    asked = CliRunner().invoke(cli, ["ask", ROUTE[1:], *TEXTS[:2], *flags, "--url", server.url])
    assert asked.exit_code == 0, asked.output
    assert expected[0][0]["label"] in asked.output


def test_a_model_without_an_entailment_serves_nothing(server: Server) -> None:
    body = {"inputs": "a", "parameters": {"candidate_labels": ["b"]}, "model": "none"}
    assert error_of(httpx.post(server.url + ROUTE, json=body)) == (424, "task_not_supported")
