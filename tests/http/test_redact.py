"""Redaction: entities become placeholders, all of it can be undone, and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from transformers import BertForTokenClassification

from cloze.client import Redaction, Replacement
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


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    tiny.CLASSES["bert-tagger"] = BertForTokenClassification
    checkpoint = tiny.save_checkpoint(root.parent / "tagger", "bert-tagger", id2label=LABELS)
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


def test_all_is_undone_also_where_the_text_has_placeholders(client: TestClient) -> None:
    redactions = ask(client, TEXTS, across_texts=True)
    assert all(len(redaction["replacements"]) > 1 for redaction in redactions)
    for text, redaction in zip(TEXTS, redactions, strict=True):
        replaced = [Replacement(**each) for each in redaction["replacements"]]
        assert Redaction(redaction["text"], replaced).undone() == text
        end = 0
        for r in redaction["replacements"]:
            assert text[r["start"] : r["end"]] == r["text"] == r["text"].strip()
            assert redaction["text"][r["redacted_start"] : r["redacted_end"]] == r["placeholder"]
            assert r["start"] >= end, "replacements overlap, or are in no order"
            end = r["end"]
    everything = [r for redaction in redactions for r in redaction["replacements"]]
    # Case and spaces make no other name.
    names = {(r["placeholder"], " ".join(r["text"].split()).lower()) for r in everything}
    assert len({name for name, _ in names}) == len({(n.split("_")[0], t) for n, t in names})
    assert {"<PER_1>", "<misc_1>", "<LOC_2>"}.isdisjoint(name for name, _ in names)


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
