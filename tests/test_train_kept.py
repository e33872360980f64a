"""What training keeps of the checkpoint that it starts from: labels, licence, tokens, positions."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    BertForSequenceClassification,
    BertForTokenClassification,
    DistilBertForSequenceClassification,
)

from cloze.cli import cli
from cloze.export.errors import TrainError
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.load.tokenizer_files import SPECIAL_TOKENS
from cloze.export.publish import export
from cloze.export.train.average import average
from cloze.export.train.distill import distill
from cloze.export.train.documents import is_held_out
from cloze.export.train.embedding import EmbeddingFiles, finetune_embedding
from cloze.export.train.evaluate import EvaluationData, evaluate, open_subject
from cloze.export.train.examples import SentenceObjective
from cloze.export.train.pretrain import pretrain
from cloze.export.train.progress import read_log
from cloze.export.train.questions import finetune_questions
from cloze.export.train.recipe import (
    CorpusSampling,
    DistillRecipe,
    EmbedRecipe,
    Optimisation,
    Phase,
    Pretraining,
    PretrainRecipe,
    QuestionsRecipe,
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


# ---- heads and labels


@pytest.mark.parametrize(
    ("model", "family", "settings"),
    [
        (BertForSequenceClassification, "bert", {"problem_type": "multi_label_classification"}),
        (DistilBertForSequenceClassification, "distilbert", {}),
        (BertForTokenClassification, "bert", {}),
    ],
)
def test_an_average_of_classifiers_classifies_by_the_same_labels(
    model: type, family: str, settings: dict[str, str], tmp_path: Path
) -> None:
    kind = f"{family}-averaged"
    tiny.CLASSES[kind] = model
    one, two = (
        tiny.save_checkpoint(tmp_path / str(seed), kind, seed, id2label=LABELS, **settings)
        for seed in (1, 2)
    )
    folder = average([str(one), str(two)], tmp_path / "average")
    weights = [load_file(each / "model.safetensors") for each in (one, two, folder)]
    assert weights[2].keys() == weights[0].keys()
    torch.testing.assert_close(
        weights[2], {n: (weights[0][n] + weights[1][n]) / 2 for n in weights[0]}
    )
    before, after = load_checkpoint(str(one)), load_checkpoint(str(folder))
    assert after.heads == before.heads
    assert after.options == before.options
    theirs, report = model.from_pretrained(folder, output_loading_info=True)  # type: ignore[attr-defined]
    assert not report["missing_keys"]
    assert theirs.config.id2label == LABELS

    relabelled = json.loads((two / "config.json").read_text())
    relabelled["id2label"] = dict(enumerate(["good", "fair", "bad"]))
    (two / "config.json").write_text(json.dumps(relabelled))
    with pytest.raises(TrainError, match="2 has other labels than"):
        average([str(one), str(two)], tmp_path / "other")


# ---- licence


def _questions(folder: Path) -> Path:
    file = folder / "questions.json"
    answers = [{"text": "king", "answer_start": 4}]
    paragraph = {
        "context": "the king was in the house",
        "qas": [{"id": "1", "question": "who was in the house", "answers": answers}],
    }
    file.write_text(json.dumps({"data": [{"title": "t", "paragraphs": [paragraph]}]}))
    return file


def _pretrain(source: str, stories: Path, options: RunOptions) -> Path:
    return pretrain([stories], PretrainRecipe(phases=SHORT), options, source=source)


def _distill(source: str, stories: Path, options: RunOptions) -> Path:
    return distill(source, [stories], DistillRecipe(phases=SHORT), options)


def _finetune_embed(source: str, stories: Path, options: RunOptions) -> Path:
    recipe = EmbedRecipe(contrastive_steps=1, contrastive_sequences=4, tokens=32, text_sequences=4)
    return finetune_embedding(source, EmbeddingFiles(text=[stories]), recipe, options)


def _finetune_qa(source: str, stories: Path, options: RunOptions) -> Path:
    recipe = QuestionsRecipe(epochs=1, tokens=40, stride=8, question_tokens=12, held_out=0.0)
    options.run_dir.mkdir()
    return finetune_questions(source, [_questions(options.run_dir)], recipe, options)


def _average(source: str, _: Path, options: RunOptions) -> Path:
    return average([source, source], options.run_dir, options.license)


@pytest.mark.parametrize("train", [_pretrain, _distill, _finetune_embed, _finetune_qa, _average])
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


def test_an_average_of_checkpoints_under_two_licences_names_none(tmp_path: Path) -> None:
    for name in ("mit", "apache-2.0"):
        tiny.save_checkpoint(tmp_path / name, "bert")
        (tmp_path / name / "README.md").write_text(f"---\nlicense: {name}\n---\n")
    sources = [str(tmp_path / name) for name in ("mit", "apache-2.0")]
    assert load_checkpoint(str(average(sources, tmp_path / "two"))).license is None


def test_a_bundle_of_a_run_has_the_licence_that_the_command_names(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source = str(checkpoints["bert"])
    arguments = ["train", "average", source, source, "--out", str(tmp_path / "out"), "--license"]
    refused = CliRunner().invoke(cli, [*arguments, "my licence\nx: y"])
    assert refused.exit_code == 2
    assert "a name such as apache-2.0" in refused.stderr
    assert CliRunner().invoke(cli, [*arguments, "apache-2.0"]).exit_code == 0
    assert export(str(tmp_path / "out"), "mine", Store(tmp_path / "store")).manifest.license == (
        "apache-2.0"
    )


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
        "method", "unit", "rate", "final_rate", "repeats_from", "dynamic", "short", "sentence",
        "keep_embeddings", "embedding_weight", "embedding_tokens", "unlikelihood",
    }  # fmt: skip
    for name, field in Pretraining.model_fields.items():
        given = {name: field.get_default()} | {"sentence": "none"}
        if name in used:
            DistillRecipe(pretraining=given, phases=SHORT)
        else:
            with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
                DistillRecipe(pretraining=given, phases=SHORT)


@pytest.mark.parametrize("weights", [{"many.jsonl": 0.6, "one.jsonl": 0.4}, {"many.jsonl": 0.6}])
def test_held_out_figures_remain_if_a_source_has_no_held_out_document(
    weights: dict[str, float], tmp_path: Path
) -> None:
    text = " ".join(["the king was in the house ."] * 20)
    lines = [json.dumps({"title": f"t{number}", "text": text}) + "\n" for number in range(40)]
    (tmp_path / "many.jsonl").write_text("".join(lines))
    assert not is_held_out("learnt", 0.3)
    (tmp_path / "one.jsonl").write_text(json.dumps({"title": "learnt", "text": text}) + "\n")
    recipe = PretrainRecipe(
        corpus=CorpusSampling(weights=weights),
        phases=SHORT,
        pretraining=Pretraining(sentence=SentenceObjective.NONE),
        held_out=0.3,
    )
    files = [tmp_path / "many.jsonl", tmp_path / "one.jsonl"]
    source = tiny.save_checkpoint(tmp_path / "source", "bert")
    pretrain(files, recipe, run_options(tmp_path / "run"), source=str(source))
    assert read_log(tmp_path / "run")[-1]["held_out_masked_loss"] > 0


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
    torch.testing.assert_close(new[160:190], old[1:31], atol=1e-6, rtol=0)
    # What the longest phase never used is filled at the end of a run.
    torch.testing.assert_close(new[190:], old[1:11], atol=1e-6, rtol=0)
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

    sentences, stereotypes = tmp_path / "sentences.tsv", tmp_path / "pairs.csv"
    sentences.write_text("the [MASK] was red\tking\n")
    stereotypes.write_text("sent_more,sent_less,stereo_antistereo\nthe king,the moon,stereo\n")
    data = EvaluationData([stories], [], [], 1.0, stereotypes, (sentences,), sequences=4)
    of_checkpoint, of_bundle = (
        evaluate(open_subject(name, store, CPU), data, tmp_path / "corpus", lambda _: None)
        for name in (str(folder), "bundle:other")
    )
    assert of_bundle == pytest.approx(of_checkpoint, rel=1e-3)
