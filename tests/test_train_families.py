"""Every family learns a little: further pre-training, fine-tuning, distillation, evaluation.

transformers reads each checkpoint, and gives the numbers that we get.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from cloze.export.families import FAMILIES
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.measure.evaluate import EvaluationData, evaluate, open_subject
from cloze.export.train.distill import distill
from cloze.export.train.embedding import EmbeddingFiles, finetune_embedding
from cloze.export.train.examples import SentenceObjective
from cloze.export.train.pretrain import pretrain
from cloze.export.train.progress import read_log
from cloze.export.train.recipe import (
    DistillRecipe,
    EmbedRecipe,
    Optimisation,
    Phase,
    Pretraining,
    PretrainRecipe,
)
from cloze.model_store import Store
from tests.training import quietly, run_options, write_pairs
from tests.unit.export.families.test_against_transformers import (
    ids_of,
    ours,
    same,
    save,
    theirs,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
LEARNT_ELSEWHERE = {"bert", "distilbert", "roberta"}  # test_train and test_train_kinds
NEW = [family for family in FAMILIES if family not in LEARNT_ELSEWHERE]
SIZES = {"max_position_embeddings": 66}


@pytest.fixture(scope="module", params=NEW)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    save(request.param, "masked_lm", folder, **SIZES)
    return folder


def phases(steps: int) -> list[Phase]:
    return [Phase(tokens=32, sequences=8, steps=steps)]


def agrees(checkpoint: Path, head: str, kind: Any) -> bool:
    """Return whether transformers computes what we do from a checkpoint."""
    network = kind.from_pretrained(checkpoint, attn_implementation="eager").eval()
    ids = ids_of(network, 9)
    return same(ours(load_checkpoint(str(checkpoint)), head, ids), theirs(network, head, ids))


def test_masked_words_are_learnt_further(source: Path, stories: Path, tmp_path: Path) -> None:
    recipe = PretrainRecipe(
        pretraining=Pretraining(sentence=SentenceObjective.NONE),
        optimisation=Optimisation(learning_rate=1e-2, precision="fp32"),
        phases=phases(40),
        held_out=0.1,
    )
    trained = pretrain([stories], recipe, run_options(tmp_path / "run"), source=str(source))
    log = read_log(trained.parent)
    assert log[-1]["masked_loss"] < 0.95 * log[0]["masked_loss"]
    assert agrees(trained, "masked_lm", AutoModelForMaskedLM)


def test_embeddings_are_learnt(source: Path, stories: Path, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.csv", 48)
    recipe = EmbedRecipe(
        optimisation=Optimisation(learning_rate=2e-3),
        contrastive_steps=2,
        contrastive_sequences=8,
        contrastive_tokens=24,
        epochs=1,
        sequences=16,
        tokens=40,
        text_sequences=4,
        held_out=0.1,
    )
    files = EmbeddingFiles(pairs=[pairs], held_out_pairs=[pairs], text=[stories])
    trained = finetune_embedding(str(source), files, recipe, run_options(tmp_path / "run"))
    data = EvaluationData([stories], [pairs], [], held_out=0.1, sequences=10, tokens=32)
    subject = open_subject(str(trained), Store(tmp_path / "store"), CPU)
    figures = evaluate(subject, data, tmp_path / "text", quietly)
    assert {"sts_spearman", "fill_mask_whole_word_top1"} <= figures.keys()


def test_a_student_has_half_of_the_layers(source: Path, stories: Path, tmp_path: Path) -> None:
    recipe = DistillRecipe(
        optimisation=Optimisation(learning_rate=1e-3, precision="fp32"),
        phases=phases(4),
        held_out=0.1,
    )
    student = distill(str(source), [stories], recipe, run_options(tmp_path / "run"))
    before, after = (load_checkpoint(str(folder)).model.config for folder in (source, student))
    assert after.family == before.family
    assert 1 <= after.layers < before.layers
    assert agrees(student, "masked_lm", AutoModelForMaskedLM)
