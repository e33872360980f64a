"""What training keeps of the checkpoint that it starts from: labels, licence, tokens, positions."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import (
    AutoTokenizer,
)

from cloze.export.errors import TrainError
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.load.tokenizer_files import SPECIAL_TOKENS
from cloze.export.measure.evaluate import EvaluationData, evaluate, open_subject
from cloze.export.publish import export
from cloze.export.train.distill import distill
from cloze.export.train.embedding import EmbeddingFiles, finetune_embedding
from cloze.export.train.pretrain import pretrain
from cloze.export.train.progress import read_log
from cloze.export.train.recipe import (
    DistillRecipe,
    EmbedRecipe,
    Optimisation,
    Phase,
    Pretraining,
    PretrainRecipe,
    Sizes,
)
from cloze.export.train.run_options import RunOptions
from cloze.model_store import Store
from tests import tiny

CPU = torch.device("cpu")
LABELS = {0: "bad", 1: "fair", 2: "good"}
SHORT = [Phase(tokens=24, sequences=4, steps=1)]


def run_options(folder: Path, license_name: str | None = None) -> RunOptions:
    return RunOptions(folder, CPU, lambda _: None, license=license_name)


# ---- licence


def _pretrain(source: str, stories: Path, options: RunOptions) -> Path:
    return pretrain([stories], PretrainRecipe(phases=SHORT), options, source=source)


def _distill(source: str, stories: Path, options: RunOptions) -> Path:
    return distill(source, [stories], DistillRecipe(phases=SHORT), options)


def _finetune_embed(source: str, stories: Path, options: RunOptions) -> Path:
    recipe = EmbedRecipe(contrastive_steps=1, contrastive_sequences=4, tokens=32, text_sequences=4)
    return finetune_embedding(source, EmbeddingFiles(text=[stories]), recipe, options)


@pytest.mark.parametrize("train", [_pretrain, _distill, _finetune_embed])
def test_a_licence_goes_from_checkpoint_to_checkpoint(
    train: Callable[[str, Path, RunOptions], Path],
    checkpoints: dict[str, Path],
    stories: Path,
    tmp_path: Path,
) -> None:
    source = tiny.save_checkpoint(tmp_path / "source", "bert")
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    kept = train(str(source), stories, run_options(tmp_path / "kept"))
    assert load_checkpoint(str(kept)).license == "mit"
    named = train(str(source), stories, run_options(tmp_path / "named", "cc-by-sa-4.0"))
    assert load_checkpoint(str(named)).license == "cc-by-sa-4.0"
    unknown = train(str(checkpoints["bert"]), stories, run_options(tmp_path / "unknown"))
    assert load_checkpoint(str(unknown)).license is None


def test_embeddings_are_tuned_in_little_memory(
    checkpoints: dict[str, Path], stories: Path, tmp_path: Path
) -> None:
    """Batches of text are planned for the steps of the run, not for any number of steps."""
    tracemalloc.start()
    try:
        _finetune_embed(str(checkpoints["bert"]), stories, run_options(tmp_path / "run"))
        assert tracemalloc.get_traced_memory()[1] < 500 * 2**20
    finally:
        tracemalloc.stop()


# ---- fields of recipes


def test_a_field_of_a_recipe_of_distillation_is_used_or_refused() -> None:
    used = {
        "method", "unit", "rate", "final_rate", "dynamic", "short", "sentence",
        "keep_embeddings", "embedding_weight", "embedding_tokens",
    }  # fmt: skip
    for name, field in Pretraining.model_fields.items():
        given = {name: field.get_default()} | {"sentence": "none"}
        if name in used:
            DistillRecipe(pretraining=given, phases=SHORT)
        else:
            with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
                DistillRecipe(pretraining=given, phases=SHORT)


# ---- positions


@pytest.mark.parametrize("keep_embeddings", [False, True])
def test_a_continued_run_adds_positions(
    keep_embeddings: bool, checkpoints: dict[str, Path], stories: Path, tmp_path: Path
) -> None:
    """At a learning rate of nearly nothing, the old positions stay and the new ones are copies."""
    recipe = PretrainRecipe(
        model=Sizes(max_tokens=200),
        phases=[Phase(tokens=24, sequences=4, steps=1), Phase(tokens=190, sequences=2, steps=2)],
        pretraining=Pretraining(keep_embeddings=keep_embeddings),
        optimisation=Optimisation(learning_rate=1e-9),
    )
    source = str(checkpoints["bert"])
    folder = pretrain([stories], recipe, run_options(tmp_path / "run"), source=source)
    before, after = (load_checkpoint(str(each)).model for each in (source, folder))
    assert (before.config.max_positions, after.config.max_positions) == (160, 200)
    old, new = (model.encoder.embeddings.position.weight for model in (before, after))
    torch.testing.assert_close(new[:160], old, atol=1e-6, rtol=0)
    torch.testing.assert_close(new[160:], old[1:41], atol=1e-6, rtol=0)
    assert export(str(folder), "long", Store(tmp_path / "store")).manifest.limits.max_tokens == 200


def test_positions_are_added_and_not_removed(
    checkpoints: dict[str, Path], stories: Path, tmp_path: Path
) -> None:
    def refusal(recipe: PretrainRecipe) -> str:
        with pytest.raises(TrainError) as error:
            pretrain(
                [stories], recipe, run_options(tmp_path / "run"), source=str(checkpoints["bert"])
            )
        assert not (tmp_path / "run").exists(), "nothing was begun"
        return str(error.value)

    longer = [Phase(tokens=190, sequences=2, steps=1)]
    assert refusal(PretrainRecipe(phases=longer)) == (
        "a phase of 190 tokens exceeds the checkpoint's 160 positions; "
        "[model] max_tokens = 190 adds positions"
    )
    assert refusal(PretrainRecipe(model=Sizes(max_tokens=64), phases=SHORT)) == (
        "[model] max_tokens = 64 is less than the checkpoint's 160 positions; "
        "positions are only added"
    )


# ---- special tokens


def test_renamed_special_tokens_are_masked_and_kept(stories: Path, tmp_path: Path) -> None:
    """A checkpoint whose ``[CLS]`` is ``<s>`` trains as one with BERT's names."""
    renamed = {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>", "unk_token": "<u>"}
    plain, other = (tiny.save_checkpoint(tmp_path / name, "bert") for name in ("plain", "other"))
    vocabulary = (other / "vocab.txt").read_text()
    for key, token in renamed.items():
        vocabulary = vocabulary.replace(SPECIAL_TOKENS[key], token)
    (other / "vocab.txt").write_text(vocabulary)
    (other / "tokenizer_config.json").write_text(json.dumps(renamed))

    log = {}
    for source in (plain, other):
        folder = _pretrain(str(source), stories, run_options(tmp_path / f"{source.name}-run"))
        log[source] = read_log(folder.parent)[-1]
        trained, before = load_checkpoint(str(folder)), load_checkpoint(str(source))
        assert trained.tokenizer.special_tokens == before.tokenizer.special_tokens
        assert trained.tokenizer.mask_id == before.tokenizer.mask_id
    assert log[other]["loss"] == pytest.approx(log[plain]["loss"])
    store = Store(tmp_path / "store")
    assert export(str(folder), "other", store).manifest.tokenizer.mask_token == "<mask>"
    theirs = AutoTokenizer.from_pretrained(folder)
    assert (theirs.cls_token, theirs.mask_token) == ("<s>", "<mask>")
    assert theirs("the king").input_ids == trained.tokenizer.tokenizer.encode("the king").ids

    sentences = tmp_path / "sentences.tsv"
    sentences.write_text("the [MASK] was red\tking\n")
    data = EvaluationData([stories], [], [], 1.0, (sentences,), sequences=4)
    of_checkpoint, of_bundle = (
        evaluate(open_subject(name, store, CPU), data, tmp_path / "corpus", lambda _: None)
        for name in (str(folder), "bundle:other")
    )
    assert of_bundle == pytest.approx(of_checkpoint, rel=1e-3)
