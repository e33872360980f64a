"""Rerankers: texts have the order and the scores of sentence-transformers, in each family."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import CrossEncoder
from starlette.testclient import TestClient
from tokenizers import Tokenizer

from cloze.export.errors import ExportError
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.service.service import single_process
from cloze.service.settings import load_settings
from tests.support.family_checkpoints import reranker

CHECKED = ("bert", "distilbert", "roberta", "modernbert", "deberta-v2", "mobilebert")
"""Families with other inputs, poolings or heads; `export/test_families` has the logits of all."""

IDENTITY = "torch.nn.modules.linear.Identity"
SIGMOID = "torch.nn.modules.activation.Sigmoid"

QUERY = "Where is the bank?"
DOCUMENTS = [
    "The bank charges a fee.", "It is at the harbour.", "Where?", "A café\u0301 in  Zürich.", "🙂",
    "the the the the", "Nobody knows where the bank is today.", "x", "The harbour was quiet.",
    "Ask at the counter, please.",
]  # fmt: skip

DECLARED: dict[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {
    "raw": ({"sentence_transformers": {"activation_fn": IDENTITY}}, None),
    "raw-older": ({"sbert_ce_default_activation_function": IDENTITY}, None),
    "raw-modules": ({"sentence_transformers": {"activation_fn": SIGMOID}}, {"activation_fn": IDENTITY}),
    "sigmoid-modules": ({"sbert_ce_default_activation_function": IDENTITY}, {"activation_fn": SIGMOID}),
    "raw-modules-silent": ({"sbert_ce_default_activation_function": IDENTITY}, {}),
}  # fmt: skip
"""Name -> what is added to ``config.json``, and what the file beside ``modules.json`` says."""


def declare(folder: Path, config: Mapping[str, Any], beside: Mapping[str, Any] | None) -> None:
    """Write what a checkpoint says of its scores."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if beside is not None:
        CrossEncoder(str(folder)).save_pretrained(str(folder))
        file = folder / "config_sentence_transformers.json"
        said = json.loads(file.read_text())
        del said["activation_fn"]
        file.write_text(json.dumps(said | beside))
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("rerankers")
    made = {family: reranker(family, root / family) for family in CHECKED}
    for name, said in DECLARED.items():
        made[name] = reranker("bert", root / name)
        declare(made[name], *said)
    made["without-types"] = reranker("bert", root / "without-types")
    file = made["without-types"] / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["model_input_names"].remove("token_type_ids")
    file.write_text(json.dumps(settings))
    return made


@pytest.fixture(scope="module")
def client(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestClient]:
    store = tmp_path_factory.mktemp("store")
    for name, checkpoint in checkpoints.items():
        export(str(checkpoint), name, Store(store))
    settings = load_settings({"model_store": store, "precision": "fp32"})
    with TestClient(single_process(settings), base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize("name", [*CHECKED, *DECLARED, "without-types"])
def test_ten_texts_have_the_order_and_the_scores_of_sentence_transformers(
    client: TestClient, checkpoints: dict[str, Path], name: str
) -> None:
    oracle = CrossEncoder(str(checkpoints[name]), model_kwargs={"attn_implementation": "eager"})
    # One by one: padding changes the last token of a MobileBERT.
    expected = oracle.predict([(QUERY, text) for text in DOCUMENTS], batch_size=1)
    body = {"model": name, "query": QUERY, "texts": DOCUMENTS}
    response = client.post("/rerank", json=body)
    assert response.status_code == 200, response.text
    ranks = response.json()
    assert [rank["index"] for rank in ranks] == np.argsort(-expected, kind="stable").tolist()
    scores = [rank["score"] for rank in ranks]
    assert scores == pytest.approx(np.sort(expected)[::-1].tolist(), rel=1e-4, abs=1e-5)
    assert np.ptp(expected) > 1e-3, "the order can be wrong"
    kind = "raw score" if name.startswith("raw") else "probability"
    assert response.headers["x-score-kind"] == kind
    [model] = [model for model in client.get("/info").json()["models"] if model["name"] == name]
    assert model["scores"]["rerank"] == kind
    for raw in (True, False):
        response = client.post("/rerank", json=body | {"raw_scores": raw})
        assert response.headers["x-score-kind"] == ("raw score" if raw else "probability")


def test_a_reranker_of_two_labels_scores_by_the_second(tmp_path: Path) -> None:
    labels = {"id2label": {0: "no", 1: "yes"}, "max_position_embeddings": 66}
    plain = reranker("bert", tmp_path / "plain", **labels)
    saved = reranker("bert", tmp_path / "saved", **labels)
    CrossEncoder(str(saved)).save_pretrained(str(saved))
    store = Store(tmp_path / "store")
    export(str(saved), "saved", store)
    export(str(plain), "asked", store, ExportOptions(tasks=("rerank",)))
    export(str(plain), "classes", store)
    three = reranker("bert", tmp_path / "three", **labels | {"id2label": dict(enumerate("abc"))})
    with pytest.raises(ExportError, match="one label or two; the head has 3"):
        export(str(three), "three", store, ExportOptions(tasks=("rerank",)))
    logits = CrossEncoder(str(plain)).predict([(QUERY, text) for text in DOCUMENTS], batch_size=1)
    expected = 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))
    assert np.ptp(expected) > 1e-3, "the order can be wrong"
    settings = load_settings({"model_store": tmp_path / "store", "precision": "fp32"})
    with TestClient(single_process(settings), base_url="http://localhost") as client:
        for name in ("saved", "asked"):
            body = {"model": name, "query": QUERY, "documents": DOCUMENTS}
            rows = client.post("/v1/rerank", json=body).json()["results"]
            assert [row["index"] for row in rows] == np.argsort(-expected, kind="stable").tolist()
            scores = [row["relevance_score"] for row in rows]
            assert scores == pytest.approx(np.sort(expected)[::-1].tolist(), rel=1e-4, abs=1e-5)
        response = client.post("/v1/rerank", json=body | {"model": "classes"})
        assert response.status_code == 424


def test_the_length_and_the_case_of_the_tuning_are_kept(tmp_path: Path) -> None:
    """Both stand beside the encoder of a directory that sentence-transformers saved."""
    folder = reranker("bert", tmp_path / "reranker")
    CrossEncoder(str(folder)).save_pretrained(str(folder))
    parts = json.loads((folder / "tokenizer.json").read_text())
    parts["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    file = folder / "sentence_bert_config.json"
    changes = {"max_seq_length": 20, "do_lower_case": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    oracle = CrossEncoder(str(folder))
    bundle = export(str(folder), "reranker", Store(tmp_path / "store"))
    assert bundle.manifest.limits.max_tokens == oracle.max_seq_length == 20
    tokens = Tokenizer.from_file(str(bundle.file(bundle.manifest.tokenizer.file)))
    pair = "Where is the BANK?", "The bank charges a FEE."
    assert tokens.encode(*pair).ids == oracle.tokenizer(*pair)["input_ids"]
    assert tokens.encode(*pair).ids == tokens.encode(*map(str.lower, pair)).ids
