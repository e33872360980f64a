"""Redaction: entities become placeholders, all of it can be undone, and what is refused."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient
from transformers import AutoTokenizer, BertForTokenClassification, TokenClassificationPipeline

from cloze.cli import cli
from cloze.client import Client, Redaction, Replacement
from cloze.export.publish import export
from cloze.model_store import Store
from cloze.service.service import single_process
from cloze.service.settings import load_settings
from tests.support import tiny
from tests.support.released_clients import run
from tests.support.serving import running_server

LABELS = dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "misc"]))
TEXTS = [
    "paris is red, and PARIS is  red <PER_1> <misc_1> <LOC_2>",
    "Walking timely doors: Ünknöwn 北京 waters!",
    "the water of the house",
    "year time door green answers paris " * 60,
]
IBAN, CARD = "DE89 3704 0044 0532 0130 00", "4111 1111 1111 1111"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny.CLASSES["bert-tagger"] = BertForTokenClassification
    return tiny.save_checkpoint(tmp_path_factory.mktemp("tagger"), "bert-tagger", id2label=LABELS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    root = tmp_path_factory.mktemp("store")
    export(str(checkpoint), "tagger", Store(root))
    return root


@pytest.fixture(scope="module")
def client(store: Path) -> Iterator[TestClient]:
    service = single_process(load_settings({"model_store": store}))
    with TestClient(service, base_url="http://localhost") as client:
        yield client


def ask(client: TestClient, inputs: Any, **parameters: Any) -> Any:
    answer = client.post("/redact", json={"inputs": inputs, "parameters": parameters})
    return answer.json()


def undone(redaction: dict[str, Any]) -> str:
    replacements = [Replacement(**replaced) for replaced in redaction["replacements"]]
    return Redaction(redaction["text"], replacements).undone()


def numbered(replacements: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Return the names of placeholders, as they count: case and spaces make no other name."""
    return {(r["placeholder"], " ".join(r["text"].split()).lower()) for r in replacements}


def test_all_is_undone_also_where_the_text_has_placeholders(client: TestClient) -> None:
    redactions = ask(client, TEXTS, across_texts=True)
    assert all(len(redaction["replacements"]) > 1 for redaction in redactions)
    for text, redaction in zip(TEXTS, redactions, strict=True):
        assert undone(redaction) == text
        end = 0
        for r in redaction["replacements"]:
            assert text[r["start"] : r["end"]] == r["text"] == r["text"].strip()
            assert redaction["text"][r["redacted_start"] : r["redacted_end"]] == r["placeholder"]
            assert r["start"] >= end, "replacements overlap, or are in no order"
            end = r["end"]
    everything = [r for redaction in redactions for r in redaction["replacements"]]
    names = numbered(everything)
    assert len({name for name, _ in names}) == len({(n.split("_")[0], t) for n, t in names})
    assert {"<PER_1>", "<misc_1>", "<LOC_2>"}.isdisjoint(name for name, _ in names)


def test_entities_are_those_of_transformers(client: TestClient, checkpoint: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, model_max_length=160)
        model = BertForTokenClassification.from_pretrained(checkpoint)
        pipeline = TokenClassificationPipeline(
            model=model, tokenizer=tokenizer, device="cpu", aggregation_strategy="first"
        )
    for text in TEXTS[:3]:
        expected = pipeline(text)
        ours = ask(client, text)["replacements"]
        assert [(r["label"], r["start"], r["end"]) for r in ours] == [
            (e["entity_group"], e["start"], e["end"]) for e in expected
        ]
        assert [r["score"] for r in ours] == pytest.approx([e["score"] for e in expected], abs=1e-4)
        middle = sorted(r["score"] for r in ours)[len(ours) // 2]
        sure = ask(client, text, min_score=middle)["replacements"]
        assert [r["start"] for r in sure] == [r["start"] for r in ours if r["score"] >= middle]
        label = ours[0]["label"]
        chosen = ask(client, text, labels=[label])["replacements"]
        assert [r["start"] for r in chosen] == [r["start"] for r in ours if r["label"] == label]


def test_every_way_to_ask_gives_the_same(client: TestClient, store: Path, tmp_path: Path) -> None:
    expected = ask(client, TEXTS[:3], patterns=["EMAIL"])

    def send(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=client.post("/redact", content=request.content).content)

    with Client("http://localhost", transport=httpx.MockTransport(send)) as ours:
        redactions = ours.redact(TEXTS[:3], patterns=["EMAIL"])
    assert [each.text for each in redactions] == [each["text"] for each in expected]
    assert [each.undone() for each in redactions] == TEXTS[:3]
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(f'{{"text": "{text}"}}\n' for text in TEXTS[:3]))
    run = ["bulk", "redact", str(source), "--output", str(tmp_path / "out"), "--pattern", "EMAIL"]
    kept = ["--output-format", "parquet", "--model-store", str(store), "--model", "tagger"]
    done = CliRunner().invoke(cli, run + kept)
    assert done.exit_code == 0, done.output
    rows = pq.read_table(tmp_path / "out" / "part-00000.parquet")["redacted"].to_pylist()
    assert [row["text"] for row in rows] == [each["text"] for each in expected]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_presidio_finds_the_same_entities(store: Path, tmp_path: Path) -> None:
    """With the released analyzer; a test that cannot install it skips and says why."""
    arguments = "presidio_recognizer.py", "presidio.txt", tmp_path / "environment"
    with running_server(store) as server:
        found = run(*arguments, server.url, TEXTS[0])
        body = {"inputs": TEXTS[0], "parameters": {"aggregation_strategy": "first"}}
        ours = httpx.post(f"{server.url}/token-classification", json=body).json()
    names = {"PER": "PERSON", "LOC": "LOCATION"}
    expected = [
        (names[e["entity_group"]], e["start"], e["end"]) for e in ours if e["entity_group"] in names
    ]
    assert sorted((e["entity"], e["start"], e["end"]) for e in found) == sorted(expected)
    assert expected
