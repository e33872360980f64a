"""Pruned and factorised models: what stays, what a graph of it computes, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForMaskedLM

from cloze.cli import cli
from cloze.export.errors import ExportError, TrainError
from cloze.export.families import FAMILIES
from cloze.export.families.pruned import read_pruned
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.publish import ExportOptions, export
from cloze.export.train.batches import TextBatch
from cloze.export.train.compress import factorise, prune
from cloze.export.train.distill import make_student
from cloze.export.train.factors import with_rank
from cloze.export.train.importance import (
    LayerParts,
    choose,
    gated,
    importance,
    layers_of,
    without_others,
)
from cloze.export.train.progress import read_log
from cloze.export.train.recipe import (
    DistilledText,
    FactoriseRecipe,
    Optimisation,
    Phase,
    PruneRecipe,
)
from cloze.model_store import Store
from cloze.model_store.heads import HEADS
from cloze.model_store.manifest import Precision
from tests.training import run_options
from tests.unit.export.families.test_against_transformers import ids_of, ours, same, save, theirs
from tests.unit.export.graph.test_graphs import verified, written
from tests.unit.export.graph.tiny_models import config, model

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"hidden_size": 32, "heads": 4, "intermediate_size": 64}
HEADS_KEPT = ([0, 2, 3], [1])
NEURONS_KEPT = ([*range(5, 53)], [*range(0, 32, 2)])
KEPT = [
    LayerParts(torch.tensor(heads), torch.tensor(neurons))
    for heads, neurons in zip(HEADS_KEPT, NEURONS_KEPT, strict=True)
]
MASKED_HEADS = (HEADS["token_embedding"], HEADS["masked_lm"], HEADS["embedding"])


def gates_of(kept: list[LayerParts], heads: int, neurons: int) -> list[LayerParts]:
    """Return 1 for what is kept, and 0 for what is not."""
    gates = []
    for layer in kept:
        gate = LayerParts(torch.zeros(heads), torch.zeros(neurons))
        gate.heads[layer.heads] = 1
        gate.neurons[layer.neurons] = 1
        gates.append(gate)
    return gates


def masked_text(rows: int) -> TextBatch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 30, (rows, 9), generator=generator)
    positions = torch.arange(rows * 9)[::3]
    labels = ids.flatten()[positions].clone()
    ids.view(-1)[positions] = 4
    types, mask = torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool)
    return replace_fields(ids, types, mask, positions, labels)


def replace_fields(
    ids: torch.Tensor, types: torch.Tensor, mask: torch.Tensor, positions: Any, labels: Any
) -> TextBatch:
    given = {
        "input_ids": ids, "token_type_ids": types, "attention_mask": mask,
        "positions": positions, "labels": labels,
    }  # fmt: skip
    names = TextBatch.__dataclass_fields__
    return TextBatch(**{name: given.get(name) for name in names})


def test_importance_is_the_loss_of_a_direct_removal() -> None:
    made = model(**SIZES)
    batch = masked_text(1)
    layers = layers_of(made)
    with torch.no_grad():
        for layer in layers:  # small parts, so that the first order is almost all
            layer.attention.output.weight *= 0.02
            layer.down.weight *= 0.02

    def loss(gates: list[LayerParts]) -> float:
        with torch.no_grad(), gated(made, gates):
            hidden = made(batch.input_ids, batch.token_type_ids, batch.attention_mask)
            logits = made.masked_lm(hidden.flatten(0, 1)[batch.positions])
            return float(torch.nn.functional.cross_entropy(logits, batch.labels))

    every = [LayerParts(torch.arange(4), torch.arange(64))] * 2
    whole = loss(gates_of(every, 4, 64))
    scores = importance(made, [batch])
    for number in range(2):
        removed = []
        for head in range(4):
            gates = gates_of(every, 4, 64)
            gates[number].heads[head] = 0
            removed.append(abs(loss(gates) - whole))
        assert scores[number].heads.tolist() == pytest.approx(removed, rel=0.05, abs=3e-6)
        gates = gates_of(every, 4, 64)
        gates[number].neurons[7] = 0
        assert float(scores[number].neurons[7]) == pytest.approx(
            abs(loss(gates) - whole), rel=0.05, abs=3e-6
        )


def test_importance_is_summed_over_sequences_without_regard_to_sign() -> None:
    made, batch = model(**SIZES), masked_text(2)
    single = [
        replace_fields(
            batch.input_ids[row : row + 1],
            batch.token_type_ids[row : row + 1],
            batch.attention_mask[row : row + 1],
            batch.positions[3 * row : 3 * row + 3] - 9 * row,
            batch.labels[3 * row : 3 * row + 3],
        )
        for row in range(2)
    ]
    together, apart = importance(made, [batch]), importance(made, single)
    for one, other in zip(together, apart, strict=True):
        assert torch.allclose(2 * one.heads, other.heads, atol=1e-5)
        assert torch.allclose(2 * one.neurons, other.neurons, atol=1e-5)


def test_the_most_important_parts_stay_and_at_least_one_group_per_layer() -> None:
    strong, weak = torch.tensor([4.0, 3, 2, 1]), torch.tensor([0.1, 9, 0.1, 0.1])
    neurons = torch.arange(64.0)
    first, second = choose([LayerParts(strong, neurons), LayerParts(weak, neurons)], 3, 63)
    assert (first.heads.tolist(), second.heads.tolist()) == ([0, 1], [1])
    assert first.neurons.tolist() == second.neurons.tolist() == [*range(32, 64)]
    even = choose([LayerParts(strong * 0 + 1, neurons), LayerParts(weak, neurons)], 1, 1)
    assert [len(layer.heads) for layer in even] == [1, 1]
    assert [len(layer.neurons) for layer in even] == [16, 16]


@pytest.mark.parametrize(
    "family", ["bert", "distilbert", "roberta", "electra", "nomic_bert", "gte"]
)
def test_a_pruned_graph_is_the_whole_model_with_masked_parts(family: str, tmp_path: Path) -> None:
    made, recipe = model(family, **SIZES), EmbeddingRecipe()
    pruned = without_others(made, KEPT, 0.0).eval()
    assert pruned.parameter_count() < made.parameter_count()
    graph = written(tmp_path, pruned, recipe, [Precision.FP32], heads=MASKED_HEADS)
    with gated(made, gates_of(KEPT, 4, 64)):
        verified(tmp_path, graph[Precision.FP32], made, recipe, MASKED_HEADS)


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.INT8])
def test_a_pruned_graph_of_a_lower_precision_agrees_with_torch(
    precision: Precision, tmp_path: Path
) -> None:
    pruned, recipe = without_others(model(**SIZES), KEPT, 0.0).eval(), EmbeddingRecipe()
    graph = written(tmp_path, pruned, recipe, [precision], heads=MASKED_HEADS)
    verified(tmp_path, graph[precision], pruned, recipe, MASKED_HEADS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save("bert", "masked_lm", folder, max_position_embeddings=40)
    return folder


def short(kind: type[Any], **fields: Any) -> Any:
    return kind(
        pretraining=DistilledText(keep_embeddings=True, embedding_tokens=64),
        optimisation=Optimisation(learning_rate=1e-3, precision="fp32"),
        phases=[Phase(tokens=24, sequences=4, steps=3)],
        held_out=0.1,
        **fields,
    )


def test_a_pruned_checkpoint_becomes_a_smaller_bundle(
    source: Path, stories: Path, tmp_path: Path
) -> None:
    recipe = short(PruneRecipe, heads=0.5, neurons=0.75, rounds=2, importance_batches=2)
    options, lines = run_options(tmp_path / "run"), []
    options = replace(options, report=lines.append)
    folder = prune(str(source), [stories], recipe, options)
    text = "\n".join(lines)
    assert "round 2 of 2: heads per layer: " in text
    assert "gate" in text
    pruned = load_checkpoint(str(folder)).model
    assert sum(pruned.config.layer_heads or ()) == 3
    assert sum(pruned.config.layer_intermediate_sizes or ()) == 64
    first = load_checkpoint(str(tmp_path / "run/round-1/checkpoint")).model.config
    assert sum(first.layer_heads or ()) == 4, "half of the way"
    settings = json.loads((folder / "config.json").read_text())
    assert sum(map(len, settings["pruned_heads"].values())) == 3
    assert settings["intermediate_sizes"] == list(pruned.config.layer_intermediate_sizes or ())
    again = prune(str(source), [stories], recipe, options)  # the run is resumed at its end
    weights, others = (load_checkpoint(str(f)).model.state_dict() for f in (folder, again))
    assert all(torch.equal(weights[name], others[name]) for name in weights)

    store = Store(tmp_path / "store")
    whole, small = (
        export(str(checkpoint), name, store, ExportOptions(tasks=("fill-mask",)))
        for checkpoint, name in ((source, "whole"), (folder, "small"))
    )
    sizes = small.manifest.architecture
    assert sizes.layer_heads == pruned.config.layer_heads
    assert sizes.layer_intermediate_sizes == pruned.config.layer_intermediate_sizes
    assert sizes.parameters < whole.manifest.architecture.parameters
    weights_of = [bundle.path.joinpath("weights.bin").stat().st_size for bundle in (whole, small)]
    assert weights_of[1] < weights_of[0]
    assert b"layer_heads" not in whole.path.joinpath("manifest.json").read_bytes()


@pytest.mark.parametrize("learns", [True, False])
def test_a_pruned_model_learns_the_next_sentence_of_the_whole_one(
    checkpoints: dict[str, Path], stories: Path, tmp_path: Path, learns: bool
) -> None:
    recipe = short(PruneRecipe, importance_batches=1, next_sentence=learns)
    folder = prune(str(checkpoints["bert"]), [stories], recipe, run_options(tmp_path / "run"))
    before, after = (load_checkpoint(str(f)).model for f in (checkpoints["bert"], folder))
    assert before.next_sentence is not None
    assert after.next_sentence is not None
    weights = zip(before.next_sentence.parameters(), after.next_sentence.parameters(), strict=True)
    assert [torch.equal(one, other) for one, other in weights] == [not learns] * 4
    assert ("held_out_sentence_loss" in read_log(tmp_path / "run")[-1]) is learns


def test_a_student_of_a_pruned_teacher_has_the_sizes_of_the_layers_that_it_keeps() -> None:
    teacher = without_others(model(**SIZES), KEPT, 0.0)
    student = make_student(teacher, 0.0)
    assert (student.config.layer_heads, student.config.layer_intermediate_sizes) == ((1,), (16,))


def test_embeddings_of_a_low_rank_are_factorised_without_loss() -> None:
    made = model(type_vocab_size=2, hidden_size=32)
    embeddings = made.encoder.embeddings
    generator = torch.Generator().manual_seed(2)
    directions = torch.randn(5, 32, generator=generator)
    with torch.no_grad():
        for table in embeddings.tables().values():
            rows = torch.randn(len(table.weight), 5, generator=generator)
            table.weight.copy_(rows @ directions + 0.3)
    ids = torch.randint(5, 30, (2, 9), generator=generator)
    types = torch.ones_like(ids)
    expected = made(ids, types)
    narrow, lost = with_rank(made, 6, 0.0)
    assert narrow.encoder.embeddings.word.weight.shape == (30, 6)
    assert torch.allclose(narrow.eval()(ids, types), expected, atol=2e-3)  # eps differs in effect
    lossy, _ = with_rank(made, 4, 0.0)
    assert not torch.allclose(lossy.eval()(ids, types), expected, atol=2e-2)
    assert {"next_sentence", "sequence_classification"} <= set(lost)


def test_transformers_reads_a_factorised_checkpoint(
    source: Path, stories: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    options = replace(run_options(tmp_path / "run"), report=lines.append)
    folder = factorise(
        str(source), [stories], short(FactoriseRecipe, rank=10, fit_batches=2), options
    )
    network = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = ids_of(network, 9)
    assert type(network).__name__ == "ElectraForMaskedLM"
    assert same(
        ours(load_checkpoint(str(folder)), "masked_lm", ids), theirs(network, "masked_lm", ids)
    )
    assert any("gate" in line for line in lines)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"pruned_heads": {"0": [4]}}, "heads are 0 to 3"),
        ({"pruned_heads": {"2": [1]}}, "layer '2' of 2"),
        ({"pruned_heads": {"0": [0, 1, 2, 3]}}, "without a head"),
        ({"pruned_heads": [1]}, "not an object"),
        ({"intermediate_sizes": 8}, "not a list"),
        ({"intermediate_sizes": [8]}, "1 numbers for 2 layers"),
        ({"intermediate_sizes": [8, 65]}, "at most 64"),
        ({"intermediate_sizes": [8, 0]}, "greater than 0"),
    ],
)
def test_settings_of_a_pruned_checkpoint_are_checked(settings: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_pruned(FAMILIES["bert"], config(**SIZES), settings)


def test_a_pruned_head_that_is_named_twice_is_one() -> None:
    pruned = read_pruned(FAMILIES["bert"], config(**SIZES), {"pruned_heads": {"1": [2, 2]}})
    assert pruned.layer_heads == (4, 3)


@pytest.mark.parametrize("family", ["albert", "mpnet", "mobilebert"])
def test_families_that_cannot_be_pruned_are_named(
    family: str, stories: Path, tmp_path: Path
) -> None:
    source = tmp_path / family
    source.mkdir()
    save(family, "masked_lm", source, max_position_embeddings=66)
    with pytest.raises(TrainError, match=f"a {family} cannot be pruned"):
        prune(str(source), [stories], short(PruneRecipe), run_options(tmp_path / "run"))
    with pytest.raises(TrainError, match=f"a {family} cannot be factorised, only a bert"):
        factorise(str(source), [stories], short(FactoriseRecipe), run_options(tmp_path / "other"))
    file = source / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pruned_heads": {"0": [1]}}))
    with pytest.raises(ExportError, match=f"not supported in a {family}"):
        load_checkpoint(str(source))


def test_bad_input_is_one_line(source: Path, stories: Path, tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        result = CliRunner().invoke(
            cli, ["train", *arguments, "--corpus", str(stories), "--out", str(tmp_path / "run")]
        )
        assert result.exit_code
        return result.output

    for share in ("0", "1.1", "-1"):
        assert "--share" in said("prune", str(source), "--share", share)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("heads = 1.5\n[[phases]]\ntokens = 16\nsequences = 4\nsteps = 1\n")
    assert "heads: Input should be less than or equal to 1, got 1.5" in said(
        "prune", str(source), "--recipe", str(recipe)
    )
    recipe.write_text("[[phases]]\ntokens = 16\nsequences = 4\nsteps = 1\n")
    assert "the rank is 24; it must be 2 to 23" in said(
        "factorise", str(source), "--rank", "24", "--recipe", str(recipe)
    )
    plain = tmp_path / "plain"
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    plain.mkdir()
    save("bert", "span", plain)
    assert "no masked-language-model head" in said("prune", str(plain), "--recipe", str(recipe))
