"""`cloze store` and `cloze bulk` with adapters: what is listed, measured in int8, and answered."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from transformers import BertForPreTraining

from cloze.cli import cli
from cloze.export.measure.texts import SENTENCES
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.manifest import Precision
from tests.support.adapter_folders import Recipe, classifier, embedding, merged, write
from tests.support.bulk_runs import bulk, numbered, read
from tests.support.bulk_runs import write as write_rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Path:
    root = tmp_path_factory.mktemp("store")
    for name in ("a-base", "plain"):
        options = ExportOptions(tasks=("embed",), precisions=(Precision.INT8,))
        if name == "a-base":
            options = ExportOptions(
                tasks=("embed", "nsp"), precisions=(Precision.INT8,), adapters=("query", "value")
            )
        export(str(checkpoints["bert"]), name, Store(root), options)
    return root


@torch.no_grad()
def separate_by_a_hairline(folder: Path, model: BertForPreTraining, store: Path) -> None:
    """Let the labels of an adapter depend on what differs least between the gate's texts."""
    tokenizer = Tokenizer.from_file(str(store / "a-base/1/tokenizer.json"))
    merged_model, _ = merged(folder, model)
    pooled = [
        merged_model.bert(torch.tensor([tokenizer.encode(text).ids[:64]])).pooler_output[0].numpy()
        for text in SENTENCES
    ]
    mean = np.mean(pooled, 0)
    least = np.linalg.svd(pooled - mean, full_matrices=False)[2][-1]
    file = folder / "adapter_model.safetensors"
    start = "base_model.model.classifier."
    head = {
        f"{start}weight": np.stack([-least, least]),
        f"{start}bias": np.array([least @ mean, -least @ mean], np.float32),
    }
    save_file(load_file(file) | head, file)


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> BertForPreTraining:
    return BertForPreTraining.from_pretrained(checkpoints["bert"]).eval()


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, model: BertForPreTraining, store: Path
) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    write(root / "stars", classifier(1), model)
    hairline = Recipe(1, task="SEQ_CLS", head={"classifier": (2, 64)}, labels=("no", "yes"))
    separate_by_a_hairline(write(root / "hairline", hairline, model), model, store)
    write(root / "vectors", Recipe(5), model)
    write(root / "broken", Recipe(6), model)
    (root / "broken/adapter_config.json").write_text("{")
    return root


def run(command: str, store: Path, *flags: str) -> Result:
    return CliRunner().invoke(cli, ["store", command, *flags, "--model-store", str(store)])


def test_adapters_are_listed_beneath_their_base(store: Path, folder: Path) -> None:
    listed = run("list", store, "--adapter", str(folder))
    assert listed.exit_code == 1, "one of them is broken"
    assert f"adapter {folder}/broken: adapter_config.json is not JSON" in listed.output
    lines = listed.stdout.splitlines()
    assert [line[: line.index(" ", 2)] for line in lines] == [
        "a-base@1", "  hairline", "  stars", "  vectors", "plain@1"
    ]  # fmt: skip
    assert "text-classification" in lines[2]
    values = run("list", store, "--json", "--adapter", str(folder / "stars"))
    assert values.exit_code == 0, values.output
    base, stars = [json.loads(line) for line in values.stdout.splitlines()][:2]
    assert (base["bundle"], base["precisions"]) == ("a-base@1", ["fp32", "int8"])
    assert {"nsp", "embed"} <= {*base["tasks"]}
    assert base["bytes"] > 100_000
    assert stars["base"] == "a-base@1"
    assert stars["precisions"] == ["fp32", "int8"]
    tensors = load_file(folder / "stars/adapter_model.safetensors")
    pooler = 64 * 64 + 64  # the base's
    assert stars["bytes"] == 4 * (sum(one.size for one in tensors.values()) + pooler)
    assert len(run("list", store).stdout.splitlines()) == 2
    refused = run("list", store, "--adapter", str(folder / "broken"))
    assert (refused.exit_code, refused.stdout) == (1, "")


def test_what_int8_loses_of_each_adapter_is_measured(store: Path, folder: Path) -> None:
    checked = run("verify", store, "a-base", "--adapter", str(folder))
    results = dict(line.split(maxsplit=1) for line in checked.stdout.splitlines())
    assert results["a-base@1"] == "ok"
    good, lost = "ok; int8 beside fp32: ", "int8 beside fp32: "
    agreement = "text_classification_agreement "
    assert results["stars"].startswith(good + agreement), results
    assert float(results["stars"].split()[-1]) >= 0.95
    assert results["hairline"].startswith(lost + agreement), results
    assert float(results["hairline"].split()[-1]) < 0.95
    assert results["vectors"].startswith(good), results
    cosine = float(results["vectors"].partition("embedding_cosine_mean ")[2][:6])
    assert 0.999 <= cosine <= 1, "integers of attention's output were cut off"
    assert checked.exit_code == 1
    assert f"int8 loses too much of hairline: {agreement}must be at least 0.95" in checked.stderr
    assert "of stars" not in checked.stderr
    assert f"adapter {folder}/broken: adapter_config.json is not JSON" in checked.stderr


def test_adapters_of_another_bundle_are_refused(store: Path, folder: Path) -> None:
    refused = run("verify", store, "plain", "--adapter", str(folder / "stars"))
    assert refused.exit_code == 1
    assert "no served bundle takes adapters (plain@1)" in refused.output


def test_a_bulk_run_has_the_results_of_its_adapter_and_a_changed_one_is_another(
    store: Path, folder: Path, model: BertForPreTraining, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", numbered(4))
    vectors = Path(shutil.copytree(folder / "vectors", tmp_path / "vectors"))
    arguments = ("embed", source, "--output", tmp_path / "out", "--adapter", vectors)
    arguments += ("--no-normalize", "--precision", "fp32")
    done = bulk(store, *arguments)
    assert done.exit_code == 0, done.output
    tokenizer = Tokenizer.from_file(str(store / "a-base/1/tokenizer.json"))
    for row in read(tmp_path / "out"):
        wanted = embedding(vectors, model, np.array(tokenizer.encode(row["text"]).ids))
        np.testing.assert_allclose(row["embedding"], wanted, rtol=0, atol=1e-5)
    vectors.rename(tmp_path / "old")
    write(vectors, Recipe(6), model)
    again = bulk(store, *arguments)
    assert again.exit_code == 1
    assert "has results of another run: its model was" in again.output


def test_adapters_that_do_not_fit_a_bulk_run_are_refused(
    store: Path, folder: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        shutil.copytree(folder / "stars", tmp_path / "several" / name)
    source, one = write_rows(tmp_path / "in.jsonl", numbered(4)), tmp_path / "several/one"
    for task, adapter, flags, message in (
        ("classify", tmp_path / "several", (), "has 2 adapters; name one"),
        ("embed", one, (), "adapter one cannot do embed; it does text-classification"),
        ("classify", one, ("--model", "plain"), "no served bundle takes adapters (plain@1)"),
        ("classify", store / "plain/1", (), "has 0 adapters; name one"),
    ):
        given = ("--output", tmp_path / "out", "--adapter", adapter, *flags)
        refused = bulk(store, task, source, *given)
        assert refused.exit_code == 1, refused.output
        assert message in refused.output
