"""Fine-tuning for embeddings: any pooling learns, and is saved, exported and served as it was.

The oracles are sentence-transformers and peft, which read what a run leaves, and the formulas.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize
from transformers import AutoModelForMaskedLM

from cloze.export.families import FAMILIES
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.measure.corpus import Corpus
from cloze.export.publish import export
from cloze.export.train.batches import padded
from cloze.export.train.embedding import (
    EmbeddingData,
    EmbeddingObjective,
    SentenceBatch,
    SentenceDraws,
)
from cloze.export.train.folder import open_folder
from cloze.export.train.kept_embeddings import open_sentences
from cloze.export.train.recipe import EmbedRecipe
from cloze.model_store import Store
from cloze.model_store.peft import read_files
from tests.support import fine_tuning
from tests.support.family_checkpoints import ids_of, ours, same, theirs
from tests.support.fine_tuning import (
    LORA,
    as_sentences,
    exported,
    held_out,
    invoke,
    save_source,
    slow_but,
)
from tests.support.training import ACTS, PEOPLE, PLACES, write_pairs, write_stories

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = [f"{PEOPLE[n]} {ACTS[n]} {PLACES[n]}." for n in range(5)] + ["an owl"]
RATES = '[optimisation]\nlearning_rate = 2e-3\nprecision = "fp32"\n'
PAIRS = "epochs = 8\nsequences = 16\ntokens = 32\n"
SHORT = "epochs = 1\ntokens = 32\n"
CONTRASTIVE = "contrastive_steps = 5\ncontrastive_sequences = 16\ncontrastive_tokens = 24\n"
TEXT = "text_sequences = 8\nheld_out = 0.1\n"


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
    # A MobileBERT reads the neighbours of each token, also those of padding: one text per batch.
    return SentenceTransformer(str(folder), device="cpu").encode(TEXTS, batch_size=1)


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


@pytest.mark.parametrize("name", slow_but(POOLINGS, "max and dense"))
def test_the_pooling_is_learnt_saved_and_exported(name: str, bert: Path, tmp_path: Path) -> None:
    """Width, prompts and layers stay; the layers are learnt; a bundle gives the same vectors."""
    source = as_sentences(bert, tmp_path / "source", *POOLINGS[name])
    before, trained = vectors(source), run(source, tmp_path, PAIRS + RATES)
    figures, after = held_out(trained), vectors(trained)
    assert figures["spearman"] > 0.3
    assert after.shape == before.shape
    assert not np.allclose(after, before, atol=1e-3)
    old, new = (SentenceTransformer(str(folder), device="cpu") for folder in (source, trained))
    assert new.prompts == old.prompts == {"query": "who : ", "document": ""}
    assert [type(module) for module in new] == [type(module) for module in old]
    assert new[1].pooling_mode == old[1].pooling_mode
    assert new.max_seq_length == old.max_seq_length
    layers = [[*torch.nn.ModuleList(list(each)[2:]).parameters()] for each in (old, new)]
    assert not any(torch.equal(one, other) for one, other in zip(*layers, strict=True))
    unit = _unit(after)
    assert exported(trained, tmp_path, TEXTS) == pytest.approx(unit, abs=1e-5)
    bundle = export(str(trained), "embedded", Store(tmp_path / "store"))
    assert bundle.manifest.embedding is not None
    assert exported("bundle:embedded", tmp_path / "store", TEXTS) == pytest.approx(unit, abs=1e-4)
    rows = [line.rsplit(",", 2) for line in (tmp_path / "pairs.csv").read_text().splitlines()]
    sides = [new.encode([row[n] for row in rows], normalize_embeddings=True) for n in (0, 1)]
    expected = spearmanr((sides[0] * sides[1]).sum(1), [float(row[2]) for row in rows]).statistic
    assert figures["spearman"] == pytest.approx(expected, abs=1e-3)


def test_no_modules_and_an_encoder_in_a_folder_of_its_own(bert: Path, tmp_path: Path) -> None:
    """Without modules, the pooling is the mean."""
    source = as_sentences(bert, tmp_path / "source", "cls")
    expected = vectors(source)
    (source / "0_Transformer").mkdir()
    for file in source.glob("*.*"):
        if file.name not in ("modules.json", "config_sentence_transformers.json"):
            file.rename(source / "0_Transformer" / file.name)
    _edit(source / "modules.json", lambda rows: rows[0].update(path="0_Transformer"))
    assert np.array_equal(vectors(source), expected)
    plain = SentenceTransformer(str(run(bert, tmp_path / "plain", SHORT + RATES)), device="cpu")
    assert plain[1].pooling_mode == "mean"
    assert isinstance(plain[2], Normalize)
    assert plain.max_seq_length == 32
    trained = run(source, tmp_path, SHORT + RATES)
    assert SentenceTransformer(str(trained), device="cpu")[1].pooling_mode == "cls"
    assert exported(trained, tmp_path, TEXTS) == pytest.approx(_unit(vectors(trained)), abs=1e-5)


@pytest.mark.parametrize("family", slow_but(FAMILIES, "bert"))
def test_heads_are_kept_beside_the_embeddings(family: str, tmp_path: Path) -> None:
    """Contrastive steps and masked text: a folder has the head and the embeddings of its family."""
    source = save_source(family, tmp_path / "source")
    trained = run(source, tmp_path, f"{SHORT}{CONTRASTIVE}{TEXT}{RATES}")
    network, info = AutoModelForMaskedLM.from_pretrained(
        trained, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"]
    ids, checkpoint = ids_of(network, 9), load_checkpoint(str(trained))
    assert same(ours(checkpoint, "masked_lm", ids), theirs(network.eval(), "masked_lm", ids))
    assert {head.task for head in checkpoint.default_heads} >= {"fill-mask", "embed"}
    assert exported(trained, tmp_path, TEXTS) == pytest.approx(_unit(vectors(trained)), abs=1e-4)


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cls and mean", "max and dense"])
def test_an_adapter_of_embeddings(name: str, bert: Path, tmp_path: Path) -> None:
    """sentence-transformers reads it with PEFT; an export merges it with the same vectors."""
    source = as_sentences(bert, tmp_path / "source", *POOLINGS[name])
    rates = RATES + LORA.replace("2e-2", "5e-3")
    recipe = f"{PAIRS}text_weight = 1.0\n{TEXT}{rates}".replace("epochs = 8", "epochs = 16")
    folder = run(source, tmp_path, recipe, "--lora", "4")
    assert held_out(folder)["spearman"] > 0.5
    assert not (folder / "model.safetensors").exists()
    described = json.loads((folder / "adapter_config.json").read_text())
    assert (described["r"], described["task_type"]) == (4, "FEATURE_EXTRACTION")
    assert not described["modules_to_save"]
    adapter = read_files(folder)
    assert adapter.layers
    assert not adapter.tensors
    after = vectors(folder)
    assert after.shape == vectors(source).shape
    assert not np.allclose(after, vectors(source), atol=1e-3)
    assert exported(folder, tmp_path, TEXTS) == pytest.approx(_unit(after), abs=1e-5)
    export(str(folder), "merged", Store(tmp_path / "store"))
    assert exported("bundle:merged", tmp_path / "store", TEXTS) == pytest.approx(
        _unit(after), abs=1e-4
    )


@pytest.mark.parametrize("options", [(), ("--lora", "2")], ids=["all weights", "lora"])
def test_a_run_that_stops_goes_on_to_the_same_weights(
    options: tuple[str, ...], bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cloze.export.train.run_options.Schedule.__init__.__defaults__", (2, 3, 4, 600.0)
    )
    source = as_sentences(bert, tmp_path / "source", "cls", ["dense"])
    (source / "2_Dense/pytorch_model.bin").touch()  # never read beside safetensors
    recipe = SHORT + CONTRASTIVE + TEXT + RATES
    with fine_tuning.stopped_after(7):
        run(source, tmp_path / "stopped", recipe, *options)
    folders = [run(source, tmp_path / each, recipe, *options) for each in ("whole", "stopped")]
    names = [file.relative_to(folders[0]) for file in folders[0].rglob("*.safetensors")]
    assert len(names) == 2
    for name in names:
        one, other = (load_file(folder / name) for folder in folders)
        assert all(torch.equal(one[key], other[key]) for key in one)


def some_pairs(bert: Path, scores: list[float]) -> tuple[EmbeddingObjective, SentenceBatch]:
    """Return an objective without dropout, and a batch of pairs; without scores, of five pairs."""
    recipe = EmbedRecipe(temperature=0.05)
    sentences = open_sentences(open_folder(str(bert))).eval()
    objective = EmbeddingObjective(sentences, recipe, EmbeddingData([([5], [6], 0.0)], []), 1)
    ids = np.random.default_rng(1).integers(5, 40, (2 * (len(scores) or 5), 7))
    return objective, SentenceBatch(*padded(ids, np.zeros_like(ids), 7), torch.tensor(scores), None)


@torch.no_grad()
def test_the_contrastive_loss_is_the_cross_entropy_of_the_other_sentence(bert: Path) -> None:
    objective, batch = some_pairs(bert, [])
    rows = objective.embed(batch)
    cosines = F.cosine_similarity(rows[0::2, None], rows[None, 1::2], dim=2).double() / 0.05
    shares = [cosines[i, i].exp() / cosines[i].exp().sum() for i in range(5)]
    loss, _ = objective.loss(batch)
    assert float(loss) == pytest.approx(-float(torch.stack(shares).log().mean()), rel=1e-4)


@torch.no_grad()
def test_the_ranking_loss_sums_over_pairs_of_other_scores(bert: Path) -> None:
    scores = [1.0, 3.0, 3.0, 0.0]
    objective, batch = some_pairs(bert, scores)
    rows = objective.embed(batch)
    cosines = F.cosine_similarity(rows[0::2], rows[1::2]).tolist()
    pairs = [(i, j) for i in range(4) for j in range(4) if scores[i] < scores[j]]
    total = 1 + sum(math.exp(20 * (cosines[i] - cosines[j])) for i, j in pairs)
    loss, _ = objective.loss(batch)
    assert float(loss) == pytest.approx(math.log(total), rel=1e-4)


def test_drawn_sentences_are_cut(bert: Path) -> None:
    corpus = Corpus(np.arange(5, 45, dtype=np.uint16), np.array([0, 2, 40]), np.array([0, 2]))
    special = open_folder(str(bert)).special
    recipe = EmbedRecipe(contrastive_tokens=8, contrastive_sequences=2)
    assert SentenceDraws(corpus, special, recipe)(0) == [special.text([*range(7, 13)])] * 2


def _edit(file: Path, change: Callable[[Any], None]) -> None:
    settings = json.loads(file.read_text())
    change(settings)
    file.write_text(json.dumps(settings))


def _pickle(folder: Path) -> None:
    file = folder / "2_Dense/model.safetensors"
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()


def _rows(change: Callable[[Any], None]) -> Callable[[Path], None]:
    return lambda folder: _edit(folder / "modules.json", change)


BAD_FOLDERS: list[tuple[Callable[[Path], Any], str]] = [
    (_pickle, "2_Dense/pytorch_model.bin is never loaded, since it can run code"),
    (lambda each: (each / "2_Dense/model.safetensors").unlink(), "Could not find 'model.safet"),
    (lambda each: (each / "1_Pooling/config.json").write_text("{"), "source cannot be loaded"),
    (_rows(lambda rows: rows[2].update(type="own.Layer")), "cannot be loaded: .*'own.Layer'"),
    (_rows(lambda rows: rows.pop(0)), "the first module is no Transformer"),
]


@pytest.mark.parametrize(("damage", "line"), BAD_FOLDERS)
def test_bad_folders(damage: Callable[[Path], Any], line: str, bert: Path, tmp_path: Path) -> None:
    source = as_sentences(bert, tmp_path / "source", "mean", ["dense"])
    damage(source)
    arguments = ["finetune-embed", source, "--pairs", write_pairs(tmp_path / "pairs.csv")]
    fine_tuning.check_refused(tmp_path, arguments, "tokens = 32\n", line)
