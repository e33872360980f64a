"""Low-rank matrices beside a frozen encoder: learnt, written as PEFT writes them, and merged.

The oracle is transformers: its modules of the names in the folder get the products. PEFT itself was
compared once, with all families and heads. sentence-transformers reads an adapter of embeddings.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from torch import Tensor

from cloze.cli import cli
from cloze.export.adapters import ALL_LAYERS, AdaptedModel
from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES
from cloze.export.load.checkpoint import Checkpoint, encoder_sha256, load_checkpoint
from cloze.export.model import hidden_states
from cloze.export.publish import export
from cloze.export.train.label_data import RowFiles
from cloze.export.train.label_tasks import finetune_rows
from cloze.export.train.low_rank import add_low_rank
from cloze.export.train.progress import read_log
from cloze.export.train.recipe import LowRank, Optimisation, Target
from cloze.export.train.run_options import RunOptions, Schedule
from cloze.export.train.save import save_adapter, save_checkpoint
from cloze.export.train.start import start_from
from cloze.export.train.task_recipe import LabelsRecipe
from cloze.model_store import Store
from cloze.model_store.batch import Encoding
from cloze.model_store.heads.sequence_classification import SequenceLabels
from cloze.model_store.sections import Pooling
from cloze.train import train
from tests.test_train_tasks import (
    CPU,
    FAST,
    LABELS,
    Stop,
    _kill_at,
    write_labelled,
    write_tagged,
)
from tests.training import quietly, write_pairs, write_questions
from tests.unit.export.families.test_against_transformers import ids_of, ours, same, save, theirs

pytestmark = pytest.mark.usefixtures("one_thread")

ALL: list[Target] = [
    "query", "key", "value", "attention-output", "feed-forward-in", "feed-forward-out"
]  # fmt: skip
LABELLED = SequenceLabels(labels=("no", "yes"), problem_type="single_label_classification")
PREFIX, HEAD = "base_model.model.", "sequence_classification"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save("bert", "masked_lm", folder, max_position_embeddings=66)
    return folder


def with_products(network: Any, adapter: Path) -> Any:
    """Return transformers' network with the matrices and the heads of an adapter."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    names = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    modules = dict(network.named_modules())
    learnt = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    targets = [f".{target}" for target in config["target_modules"]]
    assert learnt == {one for one in modules if f".{one}".endswith(tuple(targets))}
    parameters = dict(network.named_parameters())
    heads = {name for name in names if ".lora_" not in name}
    kept = tuple(f".{module}." for module in config["modules_to_save"] or ())
    assert heads == {name for name in parameters if kept and any(m in f".{name}" for m in kept)}
    with torch.no_grad():
        for module in learnt:
            a, b = (names[f"{module}.lora_{letter}.weight"] for letter in "AB")
            assert len(a) == config["r"]
            modules[module].weight += config["lora_alpha"] / config["r"] * b @ a
        for name in heads:
            parameters[name].copy_(names[name])
    return network


def disturb(model: torch.nn.Module) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)


@pytest.mark.parametrize("targets", [ALL, ["query", "value"], ["feed-forward-out"]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same_with_the_matrices_of_every_family(
    family: str, targets: list[Target], tmp_path: Path
) -> None:
    network = save(family, HEAD, tmp_path / "base")
    base = load_checkpoint(str(tmp_path / "base"))
    learnt = load_checkpoint(str(tmp_path / "base"))
    torch.manual_seed(0)
    add_low_rank(learnt.model, LowRank(rank=2, targets=targets), [HEAD])
    disturb(learnt.model)
    save_adapter(learnt.model, base, tmp_path / "adapter", heads=[HEAD])
    ids = ids_of(network, 9)
    mine, before = ours(learnt, HEAD, ids), theirs(network, HEAD, ids)
    assert same(mine, theirs(with_products(network, tmp_path / "adapter"), HEAD, ids))
    assert not same(mine, before)
    merged = load_checkpoint(str(tmp_path / "adapter"))
    assert same(ours(merged, HEAD, ids), mine)
    assert merged.options[HEAD].labels == ("a", "b", "c")
    assert merged.source.encoder_sha256 != base.source.encoder_sha256
    served = AdaptedModel.of(base.model, (ALL_LAYERS,)).parts.keys()
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    modules = {
        name.removeprefix(PREFIX).partition(".lora_")[0] for name in written if "lora_" in name
    }
    assert {FAMILIES[family].without_prefix(name) for name in modules} <= served


def recipe(**changes: Any) -> LabelsRecipe:
    lora = LowRank(rank=4, targets=ALL, learning_rate=2e-2)
    return LabelsRecipe(**{**LABELS, "epochs": 8, "lora": lora, **changes})


def learnt_tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_labels_are_learnt_and_the_encoder_is_not_written(bert: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    file = write_labelled(tmp_path / "rows.jsonl", "one")
    base, options = load_checkpoint(str(bert)), RunOptions(tmp_path / "run", CPU, quietly)
    folder = finetune_rows(base, RowFiles([file], []), recipe(epochs=40), options)
    assert read_log(folder.parent)[-1]["held_out_accuracy"] > 0.9
    assert not (folder / "model.safetensors").exists()
    with safe_open(folder / "adapter_model.safetensors", "pt") as tensors:
        assert tensors.metadata()["cloze_encoder_sha256"] == base.source.encoder_sha256
    written = json.loads((folder / "config.json").read_text())
    assert encoder_sha256(base.model) == base.source.encoder_sha256, "the base is not changed"
    described = json.loads((folder / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(bert.resolve())
    assert described["task_type"] == "SEQ_CLS"
    # An export merges: its bundle is an ordinary one, with the labels of the run.
    bundle = export(str(folder), "merged", Store(tmp_path / "store"))
    assert bundle.manifest.tasks == ("text-classification",)
    assert set(bundle.manifest.heads[HEAD].labels) == set(written["id2label"].values())


@pytest.mark.parametrize("average", [0.0, 0.5])
def test_a_run_that_stops_goes_on_to_the_same_matrices(
    average: float, bert: Path, tmp_path: Path
) -> None:
    files = RowFiles([write_labelled(tmp_path / "rows.jsonl", "one", 120)], [])
    made = recipe(epochs=1, optimisation=FAST.model_copy(update={"average": average}))
    done = []
    for name in ("whole", "stopped"):
        options = RunOptions(tmp_path / name, CPU, quietly, Schedule(log=2, checkpoint=4))
        if name == "stopped":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("cloze.export.train.loop.Progress.advance", _kill_at(5))
                with pytest.raises(Stop):
                    finetune_rows(load_checkpoint(str(bert)), files, made, options)
        done.append(finetune_rows(load_checkpoint(str(bert)), files, made, options))
    one, other = map(learnt_tensors, done)
    assert all(torch.equal(one[name], other[name]) for name in one)
    frozen = torch.load(done[1].parent / "state.pt", weights_only=True)["average"]["means"]
    assert bool(frozen) == bool(average)
    assert not [n for n in frozen if n.endswith("query.weight")], "only what is learnt is averaged"


def test_a_run_with_patience_keeps_its_best_matrices(bert: Path, tmp_path: Path) -> None:
    file = write_labelled(tmp_path / "rows.jsonl", "one")
    rates = Optimisation(head_learning_rate=0.2, precision="fp32", warmup=0.0, decay=0.01)
    made = recipe(optimisation=rates, epochs=40, patience=2)
    options = RunOptions(tmp_path / "run", CPU, quietly, Schedule(log=1, evaluate=3))
    files, base = RowFiles([file], [file]), load_checkpoint(str(bert))
    before = learnt_tensors(finetune_rows(base, files, made, options))
    assert read_log(options.run_dir)[-1]["step"] < 400
    again = learnt_tensors(finetune_rows(load_checkpoint(str(bert)), files, made, options))
    assert all(torch.equal(before[name], again[name]) for name in before)


COMMANDS = ("classify", "tokens", "qa", "embed")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_writes_an_adapter(command: str, bert: Path, tmp_path: Path) -> None:
    option, file, task = {
        "classify": ("--labelled", write_labelled(tmp_path / "a.jsonl", "one"), "SEQ_CLS"),
        "tokens": ("--tagged", write_tagged(tmp_path / "b.jsonl"), "TOKEN_CLS"),
        "qa": ("--questions", write_questions(tmp_path / "c.json"), "QUESTION_ANS"),
        "embed": ("--pairs", write_pairs(tmp_path / "d.csv"), "FEATURE_EXTRACTION"),
    }[command]
    fields = "stride = 8\nquestion_tokens = 14\n" if command == "qa" else ""
    (tmp_path / "r.toml").write_text(f"epochs = 1\ntokens = 48\n{fields}[lora]\nalpha = 6.0\n")
    arguments = [f"finetune-{command}", str(bert), option, str(file), "--lora", "3"]
    arguments += ["--recipe", str(tmp_path / "r.toml"), "--out", str(tmp_path / "run")]
    ran = CliRunner().invoke(train, arguments)
    assert ran.exit_code == 0, ran.output
    folder = tmp_path / "run/checkpoint"
    described = json.loads((folder / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["task_type"]) == (3, 6, task)
    assert described["target_modules"] == ["query", "value"]
    merged = load_checkpoint(str(folder))
    if command == "embed":
        assert (folder / "1_Pooling/config.json").is_file()
        assert merged.model.masked_lm is not None, "the heads of the base stay"
        check_that_sentence_transformers_reads(folder, merged)
    else:
        assert [head.name for head in merged.default_heads] == [
            {"classify": HEAD, "tokens": "token_classification", "qa": "span"}[command]
        ]


def check_that_sentence_transformers_reads(folder: Path, merged: Checkpoint) -> None:
    """Compare the vectors of sentence-transformers, with PEFT below it, with those of the merge."""
    model = SentenceTransformer(str(folder), device="cpu")
    texts = ["the old king", "a moon over the sea"]
    vectors = model.encode(texts)
    assert any("lora_A" in name for name, _ in model.named_parameters()), "PEFT has merged nothing"
    recipe = merged.recipe
    assert (recipe.pooling, recipe.normalize) == (Pooling.MEAN, True)
    for text, vector in zip(texts, vectors, strict=True):
        ids = np.array(model.tokenizer(text)["input_ids"], np.int32)
        encoding = Encoding(ids, np.zeros_like(ids))
        hidden = hidden_states(merged.model, [encoding])[-1]
        wanted = torch.nn.functional.normalize(hidden.mean(0), dim=0)
        assert same(torch.from_numpy(vector), wanted.detach())


def test_several_tasks_at_once_take_no_adapter(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text("steps = 1\n[lora]\nrank = 2\n")
    arguments = ["finetune-tasks", str(tmp_path / "t.toml"), "--from", str(bert)]
    arguments += ["--data", str(tmp_path), "--out", str(tmp_path / "run")]
    ran = CliRunner().invoke(train, arguments)
    assert "unknown key lora" in ran.output
    ran = CliRunner().invoke(train, [*arguments, "--lora", "8"])
    assert "No such option" in ran.output


def test_another_layer_is_refused_by_name(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('[lora]\ntargets = ["query", "pooler"]\n')
    arguments = ["finetune-qa", str(bert), "--questions", "x.json"]
    arguments += ["--recipe", str(tmp_path / "r.toml"), "--out", str(tmp_path / "run")]
    output = CliRunner().invoke(train, arguments).output
    assert "lora.targets.1" in output
    assert "'pooler'" in output


# ---- a head alone


def test_a_head_shares_the_encoder_of_a_bundle(bert: Path, tmp_path: Path) -> None:
    base = load_checkpoint(str(bert))
    torch.manual_seed(5)
    tuned = start_from(base, [HEAD], dropout=0.0, seed=1, options={HEAD: LABELLED})
    save_checkpoint(tuned, base.tokenizer, tmp_path / "tuned")
    arguments = ["export", str(tmp_path / "tuned"), "--share", "auto"]
    arguments += ["--out", str(tmp_path / "head"), "--model-store", str(tmp_path / "store")]
    ran = CliRunner().invoke(cli, arguments)
    assert ran.exit_code == 1
    assert "no bundle has the encoder of tuned" in ran.output
    export(str(bert), "base", Store(tmp_path / "store"))
    ran = CliRunner().invoke(cli, arguments)
    assert ran.exit_code == 0, ran.output
    assert "the encoder is that of base@1, which saves" in ran.output
    named = ["another" if one == "auto" else one for one in arguments]
    assert "another" in CliRunner().invoke(cli, named).output, "no such bundle"
    config = json.loads((tmp_path / "head/adapter_config.json").read_text())
    assert config["target_modules"] == "dummy-target-modules"
    assert set(config["modules_to_save"]) == {"classifier", "pooler"}
    assert {*learnt_tensors(tmp_path / "head")} == {
        f"{PREFIX}{name}.{kind}"
        for name in ("classifier", "bert.pooler.dense")
        for kind in ("weight", "bias")
    }
    head, whole = (load_checkpoint(str(tmp_path / name)) for name in ("head", "tuned"))
    ids = torch.tensor([[9, 10, 11]])
    weights = whole.model.state_dict()
    assert weights.keys() == head.model.state_dict().keys()
    assert all(torch.equal(one, weights[name]) for name, one in head.model.state_dict().items())
    # A product of equal weights may round otherwise where they lie elsewhere in memory.
    torch.testing.assert_close(ours(head, HEAD, ids), ours(whole, HEAD, ids), atol=1e-6, rtol=0)
    assert head.options == whole.options
    assert head.source.encoder_sha256 == base.source.encoder_sha256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--share", "auto"], "give --name for a bundle, or --share and --out"),
        (["--share", "auto", "--out", "x", "--precision", "int8"], "no other option"),
        (["--share", "auto", "--out", "x"], "none for labels, tags or answers"),
        (["--share", "auto", "--out", "x", "--task", "fill-mask"], "fill-mask cannot be shared"),
    ],
)
def test_a_head_that_cannot_be_shared_is_refused(
    arguments: list[str], message: str, bert: Path, tmp_path: Path
) -> None:
    store = ["--model-store", str(tmp_path)]
    ran = CliRunner().invoke(cli, ["export", str(bert), *arguments, *store])
    assert ran.exit_code
    assert message in " ".join(ran.output.split())


# ---- folders that do not fit


@pytest.fixture
def adapter(bert: Path, tmp_path: Path) -> Path:
    base, learnt = load_checkpoint(str(bert)), load_checkpoint(str(bert))
    add_low_rank(learnt.model, LowRank(rank=2), [])
    disturb(learnt.model)
    save_adapter(learnt.model, base, tmp_path / "adapter", heads=[])
    return tmp_path / "adapter"


def test_an_adapter_of_another_encoder_is_refused(adapter: Path, tmp_path: Path) -> None:
    save("bert", "masked_lm", tmp_path / "other", hidden_act="relu", max_position_embeddings=66)
    change(adapter, base_model_name_or_path=str(tmp_path / "other"))
    with pytest.raises(ExportError, match="adapter of another encoder"):
        load_checkpoint(str(adapter))


def change(folder: Path, **settings: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"alpha_pattern": {".*query": 3}}, "alpha_pattern"),
        ({"r": 0}, "its rank is 0"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),  # it changes the base
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"base_model_name_or_path": "/nowhere"}, "no directory /nowhere"),
    ],
)
def test_what_is_not_supported_is_named(
    settings: dict[str, Any], message: str, adapter: Path
) -> None:
    change(adapter, **settings)
    with pytest.raises(ExportError, match=message):
        load_checkpoint(str(adapter))


QUERY = f"{PREFIX}encoder.layer.0.attention.self.query"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{QUERY}.lora_A.weight", torch.full((2, 24), torch.nan), "not finite"),
        (f"{QUERY}.lora_A.weight", torch.zeros(3, 24), r"A \[3, 24\] .* its rank is 2"),
        (f"{QUERY}.lora_B.weight", torch.zeros(48, 2), r"the base has \[24, 24\]"),
        (f"{QUERY}.lora_magnitude_vector", torch.zeros(24), "lora_magnitude_vector' is not"),
        (f"{QUERY.replace('0', '7')}.lora_A.weight", torch.zeros(2, 24), "has lora_A only"),
        ("encoder.layer.0.lora_A.weight", torch.zeros(2, 24), "does not begin with"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    name: str, tensor: Tensor, message: str, adapter: Path
) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file({**load_file(file), name: tensor}, file)
    with pytest.raises(ExportError, match=message):
        load_checkpoint(str(adapter))


def test_a_foreign_folder_without_labels_has_the_usual_names(bert: Path, tmp_path: Path) -> None:
    network = save("bert", HEAD, tmp_path / "base")
    base, learnt = (load_checkpoint(str(tmp_path / "base")) for _ in range(2))
    add_low_rank(learnt.model, LowRank(rank=2), [HEAD])
    disturb(learnt.model)
    folder = tmp_path / "adapter"
    save_adapter(learnt.model, base, folder, heads=[HEAD])
    (folder / "config.json").unlink()
    change(folder, use_rslora=True, lora_alpha=8 * 2**0.5)
    merged, ids = load_checkpoint(str(folder)), ids_of(network, 9)
    assert merged.options[HEAD].labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert same(ours(merged, HEAD, ids), ours(learnt, HEAD, ids)), "8 sqrt(2) / sqrt(2) = 16 / 2"
