"""Sparse embeddings: the numbers of sentence-transformers' SparseEncoder, in its directory or plain."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

from cloze.export.errors import ExportError
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.load.tokenizer import load_tokenizer
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from tests.support import tiny
from tests.support.serving import Server, running_server

TEXTS = ["the king", "paris is the capital of france", "year time door green " * 60, "red"]
TASKS = ("sparse", "fill-mask", "embed")


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of a sparse encoder of each family, as its own library saves it."""
    root = tmp_path_factory.mktemp("splade")
    folders = {}
    for family, kind in (("bert", "bert-mlm"), ("distilbert", "distilbert")):
        plain = tiny.save_checkpoint(root / f"{family}-plain", kind)
        load_tokenizer(plain).tokenizer.save(str(plain / "tokenizer.json"))
        settings = {"tokenizer_class": "BertTokenizer", "model_max_length": 160}
        (plain / "tokenizer_config.json").write_text(json.dumps(settings))
        modules = [MLMTransformer(str(plain)), SpladePooling("max")]
        SparseEncoder(modules=modules, device="cpu").save_pretrained(str(root / family))
        folders[family] = root / family
    return folders


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, oracles: dict[str, Path]) -> Path:
    root = tmp_path_factory.mktemp("store")
    options = ExportOptions(tasks=TASKS)
    for family, folder in oracles.items():
        export(str(folder), family, Store(root), options)
    return root


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with running_server(store, "--precision", "fp32") as server:
        yield server


def ask(server: Server, inputs: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/embed_sparse", json={"inputs": inputs, **options})


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_weights_are_those_of_sentence_transformers(
    server: Server, oracles: dict[str, Path], family: str
) -> None:
    encoder = SparseEncoder(str(oracles[family]), device="cpu")
    expected = encoder.encode(TEXTS).to_dense()
    response = ask(server, TEXTS, model=family)
    assert response.status_code == 200, response.text
    assert response.headers["x-truncated"] == "1"
    for ours, theirs in zip(response.json(), expected, strict=True):
        assert [row.keys() for row in ours] == [{"index", "value"}] * len(ours)
        values = [row["value"] for row in ours]
        assert values == sorted(values, reverse=True)
        assert {row["index"] for row in ours} == set(theirs.nonzero().flatten().tolist())
        assert values == pytest.approx([float(theirs[row["index"]]) for row in ours], abs=1e-4)


def test_the_heaviest_words_can_be_named(server: Server, oracles: dict[str, Path]) -> None:
    encoder = SparseEncoder(str(oracles["bert"]), device="cpu")
    expected = encoder.decode(encoder.encode(TEXTS[1]), top_k=7)
    (rows,) = ask(server, TEXTS[1], top_k=7, return_tokens=True).json()
    assert [row["token"] for row in rows] == [token for token, _ in expected]


@pytest.mark.parametrize(
    ("name", "value"), [("pooling_strategy", "sum"), ("activation_function", "log1p_relu")]
)
def test_another_pooling_is_refused(
    oracles: dict[str, Path], tmp_path: Path, name: str, value: str
) -> None:
    folder = shutil.copytree(oracles["bert"], tmp_path / "copy")
    (config,) = folder.glob("1_SpladePooling/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {name: value}))
    with pytest.raises(ExportError, match=name):
        load_checkpoint(str(folder))
