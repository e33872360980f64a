"""What evaluation measures of checkpoints and of bundles, with scores that are known."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from cloze.export.measure.evaluate import EvaluationData, Sentence, complete, evaluate, open_subject
from cloze.export.measure.scorer import MaskedRow, row_arrays, score_masks
from cloze.export.publish import ExportOptions, export
from cloze.export.train.pretrain import pretrain
from cloze.model_store import Store
from cloze.model_store.manifest import Precision, Weights
from tests.support.training import quietly, run_options, tiny_recipe, write_pairs

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a run long enough to know the stories."""
    return pretrain([stories], tiny_recipe(steps=250), run_options(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.csv")


def figures(
    source: str, stories: Path, pairs: Path | None, store: Path = Path()
) -> dict[str, float]:
    subject = open_subject(source, Store(store), CPU)
    data = EvaluationData(
        [stories], [pairs] if pairs else [], [], held_out=0.1, sequences=60, tokens=32
    )
    with tempfile.TemporaryDirectory() as folder:
        return evaluate(subject, data, Path(folder), quietly)


def test_bundle_and_checkpoint_are_measured_alike(
    checkpoints: dict[str, Path], stories: Path, pairs: Path, tmp_path: Path
) -> None:
    export(str(checkpoints["bert"]), "trained", Store(tmp_path))
    checkpoint = figures(str(checkpoints["bert"]), stories, pairs)
    bundle = figures("bundle:trained", stories, pairs, tmp_path)
    assert len(checkpoint) == 9
    assert bundle == pytest.approx(checkpoint, abs=1e-3, rel=1e-3)


def test_sentences_count_their_first_word(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    subject = open_subject(str(checkpoints["bert"]), Store(Path()), CPU)
    masked = "The old [MASK] saw the moon ."
    (likeliest,) = complete([Sentence(masked, ("x",))], subject.tokenizer, subject.scorer)
    file = tmp_path / "first-words.tsv"
    file.write_text(f"{masked}\tnothing, {likeliest.upper()}\n{masked}\tnothing\n")
    said: list[str] = []
    data = EvaluationData([], [], [], 1.0, sentences=(file,))
    measured = evaluate(subject, data, tmp_path, said.append)
    assert measured == {"first_words": 0.5, "first_words_repeats": 0}
    assert said == [f"right: {masked} {likeliest}", f"wrong: {masked} {likeliest}"]


@pytest.mark.slow
@pytest.mark.parametrize("weights", [Weights.FP32, Weights.INT8])
def test_a_bundle_becomes_a_checkpoint_again(
    weights: Weights, trained: Path, tmp_path: Path
) -> None:
    """scripts/checkpoint-from-bundle writes the numbers that the bundle's graph computes with."""
    store, folder = Store(tmp_path / "store"), tmp_path / "checkpoint"
    options = ExportOptions(precisions=(Precision.INT8,), weights=weights)
    export(str(trained), "known", store, options)
    script = ROOT / "scripts" / "checkpoint-from-bundle"
    subprocess.run(
        [sys.executable, script, "known", folder, tmp_path / "store"],
        check=True,
        timeout=120,
        cwd=ROOT,
    )
    bundle, checkpoint = (open_subject(name, store, CPU) for name in ("bundle:known", str(folder)))
    assert checkpoint.heads >= bundle.heads
    tokenizer = bundle.tokenizer.tokenizer
    ids = np.array([tokenizer.encode("The old owl saw the [MASK] .").ids])
    zeros, position = np.zeros_like(ids), np.array([6])
    label = np.array([tokenizer.token_to_id("moon")])
    row = MaskedRow(ids[0], zeros[0], position, label)
    [(_, expected)], [(_, found)] = (
        list(score_masks(subject.scorer, [row], k=1)) for subject in (bundle, checkpoint)
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(
        row_arrays(checkpoint.scorer, "next_sentence", [(ids[0], zeros[0])]),
        row_arrays(bundle.scorer, "next_sentence", [(ids[0], zeros[0])]),
        atol=1e-4,
    )
