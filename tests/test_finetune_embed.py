"""Fine-tuning for embeddings: any pooling learns, and is saved, exported and served as it was.

The oracles are sentence-transformers and peft, which read what a run leaves, and the formulas.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

from cloze.export.measure.evaluate import open_subject
from cloze.export.measure.scorer import unit_embeddings
from cloze.export.publish import export
from cloze.model_store import Store
from tests.test_finetune import held_out, invoke, save_source
from tests.training import ACTS, PEOPLE, PLACES, write_pairs, write_stories

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = [f"{PEOPLE[n]} {ACTS[n]} {PLACES[n]}." for n in range(5)] + ["an owl"]
RATES = '[optimisation]\nlearning_rate = 2e-3\nprecision = "fp32"\n'
PAIRS = "epochs = 5\nsequences = 16\ntokens = 32\n"
CONTRASTIVE = "contrastive_steps = 10\ncontrastive_sequences = 16\ncontrastive_tokens = 24\n"
TEXT = "text_sequences = 8\nheld_out = 0.1\n"


def as_sentences(source: Path, folder: Path, pooling: Any, layers: Sequence[str] = ()) -> Path:
    """Save an encoder as a sentence-transformer with a pooling and with layers after it."""
    model = SentenceTransformer(str(source), device="cpu")
    model[1] = Pooling(model[0].get_embedding_dimension(), pooling)
    size = model[1].get_embedding_dimension()
    torch.manual_seed(7)
    modules = {"dense": Dense(size, 10), "normalize": Normalize()}
    for name in layers:
        model.append(modules[name])
    model.prompts = {"query": "who : "}
    model.save(str(folder), create_model_card=False)
    return folder


def run(source: Path, folder: Path, recipe: str, *options: str) -> Path:
    """Run the command on pairs, and on text if the recipe needs it; return the folder it leaves."""
    folder.mkdir(exist_ok=True)
    pairs, text = write_pairs(folder / "pairs.csv"), write_stories(folder / "text.txt")
    (folder / "recipe.toml").write_text(recipe)
    given = ["--pairs", pairs, "--held-out-pairs", pairs]
    given += ["--corpus", text] if "contrastive" in recipe or "text_" in recipe else []
    arguments = [source, *given, "--recipe", folder / "recipe.toml", "--out", folder / "run"]
    ran = invoke("finetune-embed", *arguments, "--device", "cpu", *options)
    assert ran.exit_code == 0, ran.output
    return folder / "run" / "checkpoint"


def vectors(folder: Path) -> np.ndarray:
    """The embeddings of sentence-transformers itself."""
    return SentenceTransformer(str(folder), device="cpu").encode(TEXTS)


def exported(source: str, store: Path) -> np.ndarray:
    """The unit vectors of Cloze: of a folder, or of a bundle's graph."""
    subject = open_subject(source, Store(store), torch.device("cpu"))
    ids = [each.ids for each in subject.tokenizer.tokenizer.encode_batch(TEXTS)]
    return unit_embeddings(subject.scorer, ids)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source("bert", tmp_path_factory.mktemp("bert"))


POOLINGS = {
    "cls": ("cls", ()),
    "mean and normalised": ("mean", ("normalize",)),
    "cls and mean": (("cls", "mean"), ()),
    "max and dense": ("max", ("dense", "normalize")),
    "last": ("lasttoken", ()),
    "weighted": ("weightedmean", ("dense",)),
}


@pytest.mark.parametrize("name", POOLINGS)
def test_the_pooling_is_learnt_saved_and_exported(name: str, bert: Path, tmp_path: Path) -> None:
    """Width, prompts and layers stay; the layers are learnt; a bundle gives the same vectors."""
    source = as_sentences(bert, tmp_path / "source", *POOLINGS[name])
    before, trained = vectors(source), run(source, tmp_path, PAIRS + RATES)
    figures, after = held_out(trained), vectors(trained)
    assert figures["spearman"] > 0.5
    assert after.shape == before.shape
    assert not np.allclose(after, before, atol=1e-3)
    old, new = (SentenceTransformer(str(folder), device="cpu") for folder in (source, trained))
    assert new.prompts == old.prompts == {"query": "who : ", "document": ""}
    assert [type(module) for module in new] == [type(module) for module in old]
    assert new[1].pooling_mode == old[1].pooling_mode
    assert new.max_seq_length == old.max_seq_length
    for one, other in zip(list(old)[2:], list(new)[2:], strict=True):
        assert all(
            not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)
        )
    unit = after / np.linalg.norm(after, axis=1, keepdims=True)
    assert exported(str(trained), tmp_path) == pytest.approx(unit, abs=1e-5)
    bundle = export(str(trained), "embedded", Store(tmp_path / "store"))
    assert bundle.manifest.embedding is not None
    assert exported("bundle:embedded", tmp_path / "store") == pytest.approx(unit, abs=1e-4)
    rows = [line.rsplit(",", 2) for line in (tmp_path / "pairs.csv").read_text().splitlines()]
    sides = [new.encode([row[n] for row in rows], normalize_embeddings=True) for n in (0, 1)]
    expected = spearmanr((sides[0] * sides[1]).sum(1), [float(row[2]) for row in rows]).statistic
    assert figures["spearman"] == pytest.approx(expected, abs=1e-3)


def test_a_folder_without_modules_has_mean_pooling(bert: Path, tmp_path: Path) -> None:
    trained = SentenceTransformer(str(run(bert, tmp_path, PAIRS + RATES)), device="cpu")
    assert trained[1].pooling_mode == "mean"
    assert trained.max_seq_length == 32
