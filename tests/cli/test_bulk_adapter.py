"""`cloze bulk` with an adapter: the results are the engine's, and what does not fit is refused."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer
from transformers import BertForPreTraining

from cloze.cli import cli
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Bundle, Store
from tests.support.adapter_folders import LABELS, Recipe, classifier, embedding, logits, write

TEXTS = ["the king", "the old king was in the house", "a moon over the sea"]


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> BertForPreTraining:
    return BertForPreTraining.from_pretrained(checkpoints["bert"]).eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Bundle:
    store = Store(tmp_path_factory.mktemp("store"))
    export(str(checkpoints["bert"]), "plain", store)
    options = ExportOptions(adapters=("query", "value"))
    return export(str(checkpoints["bert"]), "base", store, options)


def bulk(base: Bundle, task: str, adapter: Path, folder: Path, *flags: str) -> Result:
    """Run the command in this process on `TEXTS`."""
    if not (folder / "in.jsonl").exists():
        (folder / "in.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    words = ["bulk", task, str(folder / "in.jsonl"), "--output", str(folder / "out")]
    words += ["--output-format", "parquet", "--precision", "fp32", "--adapter", str(adapter)]
    words += ["--model-store", str(base.path.parents[1]), *flags]
    return CliRunner().invoke(cli, words, prog_name="cloze")


def input_ids(base: Bundle, text: str) -> np.ndarray:
    tokenizer = Tokenizer.from_file(str(base.file("tokenizer.json")))
    return np.array(tokenizer.encode(text).ids, np.int64)


def test_the_adapter_answers_and_a_changed_one_is_another(
    base: Bundle, model: BertForPreTraining, tmp_path: Path
) -> None:
    vectors = write(tmp_path / "vectors", Recipe(5), model)
    done = bulk(base, "embed", vectors, tmp_path, "--no-normalize")
    assert done.exit_code == 0, done.output
    table = pq.read_table(tmp_path / "out")
    for text, vector in zip(TEXTS, table["embedding"].to_pylist(), strict=True):
        wanted = embedding(vectors, model, input_ids(base, text))
        np.testing.assert_allclose(vector, wanted, rtol=0, atol=1e-5)
    vectors.rename(tmp_path / "old")
    write(vectors, Recipe(6), model)
    again = bulk(base, "embed", vectors, tmp_path, "--no-normalize")
    assert again.exit_code == 1
    assert "has results of another run: its model was" in again.output


def test_a_head_of_an_adapter_labels_texts(
    base: Bundle, model: BertForPreTraining, tmp_path: Path
) -> None:
    stars = write(tmp_path / "stars", classifier(1), model)
    done = bulk(base, "classify", stars, tmp_path)
    assert done.exit_code == 0, done.output
    for text, labels in zip(
        TEXTS, pq.read_table(tmp_path / "out")["labels"].to_pylist(), strict=True
    ):
        wanted = logits(stars, model, input_ids(base, text), tokens=False)
        best = np.exp(wanted - wanted.max())
        scores = dict(zip(LABELS, best / best.sum(), strict=True))
        assert {row["label"]: row["score"] for row in labels} == pytest.approx(scores, abs=1e-5)


def test_what_does_not_fit_is_refused_by_name(
    base: Bundle, model: BertForPreTraining, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        write(tmp_path / "several" / name, classifier(1), model)
    one = tmp_path / "several/one"
    for task, adapter, flags, message in (
        ("classify", tmp_path / "several", (), "has 2 adapters; name one"),
        ("embed", one, (), "adapter one cannot do embed; it does text-classification"),
        ("classify", one, ("--model", "plain"), "no served bundle takes adapters (plain@1)"),
        ("classify", base.path, (), "has 0 adapters; name one"),
    ):
        refused = bulk(base, task, adapter, tmp_path, *flags)
        assert refused.exit_code == 1, refused.output
        assert message in refused.output
