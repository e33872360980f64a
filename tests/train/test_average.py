"""The average of folders: of every tensor, of every class, with heads beside the weights."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import BertForSequenceClassification, DistilBertForTokenClassification

from cloze.cli import cli
from cloze.export.errors import TrainError
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.publish import export
from cloze.export.train.average import average
from cloze.model_store import Store
from tests.support import tiny

LABELS = {0: "bad", 1: "fair", 2: "good"}
SEVERAL = {"id2label": LABELS, "problem_type": "multi_label_classification"}
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "bert-one": (BertForSequenceClassification, SEVERAL),
    "distilbert-one": (DistilBertForTokenClassification, {"id2label": LABELS}),
    "bert": (tiny.CLASSES["bert"], {}),
}


def two(kind: str, folder: Path) -> list[Path]:
    """Save two checkpoints that differ in all weights."""
    tiny.CLASSES[kind], settings = KINDS[kind]
    return [tiny.save_checkpoint(folder / str(seed), kind, seed, **settings) for seed in (1, 2)]


def mean_of(folders: list[Path], folder: Path) -> Path:
    return average([str(each) for each in folders], folder)


def check_means(folders: list[Path], mean: Path, file: str = "model.safetensors") -> None:
    read = partial(torch.load, weights_only=True) if file.endswith(".pt") else load_file
    one, other, both = (read(each / file) for each in (*folders, mean))
    assert both.keys() == one.keys()
    assert any(not torch.equal(one[name], other[name]) for name in one)
    torch.testing.assert_close(both, {name: (one[name] + other[name]) / 2 for name in one})


@pytest.mark.parametrize("kind", KINDS)
def test_an_average_is_the_mean_of_all_weights(kind: str, tmp_path: Path) -> None:
    folders = two(kind, tmp_path)
    mean = mean_of(folders, tmp_path / "mean")
    check_means(folders, mean)
    before, after = load_checkpoint(str(folders[0])), load_checkpoint(str(mean))
    assert after.heads == before.heads
    assert after.options == before.options
    _, report = KINDS[kind][0].from_pretrained(mean, output_loading_info=True)  # type: ignore[attr-defined]
    assert not report["missing_keys"]


def test_heads_beside_the_weights_are_averaged(tmp_path: Path) -> None:
    """BGE-M3 has heads in files of their own, and a sentence-transformer has dense layers."""
    folders = two("bert", tmp_path)
    for number, folder in enumerate(folders):
        for file, size in {"sparse_linear.pt": 1, "colbert_linear.pt": 32}.items():
            state = {"weight": torch.full((size, 64), float(number)), "bias": torch.zeros(size)}
            torch.save(state, folder / file)
        (folder / "2_Dense").mkdir()
        dense = {"linear.weight": torch.full((8, 64), float(number))}
        save_file(dense, folder / "2_Dense/model.safetensors")
        (folder / "2_Dense/config.json").write_text(json.dumps({"in_features": 64}))
    mean = mean_of(folders, tmp_path / "mean")
    for file in ("sparse_linear.pt", "colbert_linear.pt", "2_Dense/model.safetensors"):
        check_means(folders, mean, file)
    assert (mean / "2_Dense/config.json").is_file()
    (folders[0] / "sparse_linear.pt").unlink()
    with pytest.raises(TrainError, match=r"2 has other sizes or other heads than .*1: weight"):
        mean_of(folders, tmp_path / "other")


def test_an_average_keeps_what_only_the_first_folder_has(tmp_path: Path) -> None:
    """The second folder is an encoder without heads, whose names lack the prefix."""
    first, whole = two("bert", tmp_path)
    encoder = tiny.CLASSES["bert-plain"].from_pretrained(whole)
    encoder.save_pretrained(tmp_path / "encoder")
    (tmp_path / "encoder/vocab.txt").write_bytes((whole / "vocab.txt").read_bytes())
    mean = mean_of([first, tmp_path / "encoder"], tmp_path / "mean")
    one, other, both = (load_file(each / "model.safetensors") for each in (first, whole, mean))
    assert "cls.seq_relationship.weight" in both
    for name, tensor in one.items():
        expected = (tensor + other[name]) / 2 if name.startswith("bert.") else tensor
        torch.testing.assert_close(both[name], expected)
    with pytest.raises(TrainError, match="other sizes or other heads"):
        mean_of([tmp_path / "encoder", first], tmp_path / "other")


def test_only_folders_of_one_kind_have_an_average(tmp_path: Path) -> None:
    one, other = two("bert-one", tmp_path)
    with pytest.raises(TrainError, match="at least two"):
        mean_of([one], tmp_path / "mean")
    swapped = (other / "config.json").read_text().replace("good", "?").replace("bad", "good")
    (other / "config.json").write_text(swapped.replace("?", "bad"))
    with pytest.raises(TrainError, match="2 has other labels than"):
        mean_of([one, other], tmp_path / "mean")


@pytest.mark.parametrize(
    ("other", "given", "expected"),
    [("mit", None, "mit"), ("apache-2.0", None, None), ("mit", "cc-by-4.0", "cc-by-4.0")],
)
def test_an_average_has_the_licence_of_all_or_the_given_one(
    other: str, given: str | None, expected: str | None, tmp_path: Path
) -> None:
    folders = two("bert", tmp_path)
    for folder, name in zip(folders, ("mit", other), strict=True):
        (folder / "README.md").write_text(f"---\nlicense: {name}\n---\n")
    arguments = ["train", "average", *map(str, folders), "--out", str(tmp_path / "mean")]
    ran = CliRunner().invoke(cli, [*arguments, *(["--license", given] if given else [])])
    assert ran.exit_code == 0, ran.output
    exported = export(str(tmp_path / "mean"), "mean", Store(tmp_path / "store"))
    assert exported.manifest.license == expected
    assert (exported.path / "README.md").read_text() == (tmp_path / "mean/README.md").read_text()
    refused = CliRunner().invoke(cli, [*arguments, "--license", "my licence\nx: y"])
    assert "a name such as apache-2.0" in refused.stderr
