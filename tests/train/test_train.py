"""The loop of training: steps, rates, averages, checkpoints, and the recipes of the package."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForPreTraining

from cloze.export.train.loop import train
from cloze.export.train.optimisation import make_optimizer, schedule_factor
from cloze.export.train.progress import read_log
from cloze.export.train.recipe import (
    RECIPES,
    DistillRecipe,
    EmbedRecipe,
    LabelsRecipe,
    Optimisation,
    PretrainRecipe,
    QuestionsRecipe,
    Recipe,
    TagsRecipe,
    TasksRecipe,
    load_recipe,
)
from cloze.export.train.run_options import RunOptions, Schedule

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def quietly(_: str) -> None:
    """Nobody listens."""


def run_options(run_dir: Path, schedule: Schedule) -> RunOptions:
    return RunOptions(run_dir, CPU, quietly, schedule)


class StopAt(RuntimeError):
    """A stop in the middle of a run."""


DEFAULT_MODELS = Path(__file__).parents[2] / "scripts/recipes"
FILES = [*sorted(RECIPES.glob("*.toml")), *sorted(DEFAULT_MODELS.glob("*.toml"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_recipes_of_the_package_and_of_the_default_models_are_recipes(file: Path) -> None:
    kinds = {"pretrain": PretrainRecipe, "distill": DistillRecipe}
    special = {
        "finetune-qa": QuestionsRecipe,
        "finetune-embed": EmbedRecipe,
        "finetune-classify": LabelsRecipe,
        "finetune-tokens": TagsRecipe,
        "finetune-tasks": TasksRecipe,
    }
    kind = special.get("-".join(file.stem.split("-")[:2])) or kinds[file.stem.split("-")[0]]
    assert load_recipe(str(file), kind, seed=7).seed == 7


def test_accumulated_batches_are_one_large_batch() -> None:
    """The gradient of two halves equals that of the whole."""

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3, 1))

    class Points:
        tokens = 1

        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def to(self, _: torch.device) -> "Points":
            return self

    x = torch.arange(24.0).view(8, 3) / 24

    class Fit:
        steps = 4

        def __init__(self, parts: int) -> None:
            self.module = Line()
            self.parts = parts

        def batch(self, _: int, part: int) -> Points:
            return Points(x.chunk(self.parts)[part])

        def loss(self, batch: Points):
            return ((batch.x @ self.module.weight - 1) ** 2).mean(), {}

        def evaluate(self, _: int):
            return {}

    def fitted(parts: int, folder: Path) -> torch.Tensor:
        objective = Fit(parts)
        recipe = Optimisation(learning_rate=0.1, accumulation=parts, precision="fp32")
        train(objective, run_options(folder, Schedule()), Recipe(optimisation=recipe))
        return objective.module.weight.detach()

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        torch.testing.assert_close(fitted(1, Path(one)), fitted(4, Path(two)))


class _Walk(torch.nn.Module):
    """One weight, which the fit below moves by a known gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))


class _Walking:
    """An objective whose loss is the weight; it remembers the weight before each step."""

    steps = 10

    def __init__(self) -> None:
        self.module = _Walk()
        self.before: list[float] = []
        self.measured: list[float] = []

    def batch(self, _: int, __: int) -> "_Walking":
        return self

    tokens = 1

    def to(self, _: torch.device) -> "_Walking":
        return self

    def loss(self, _: "_Walking"):
        self.before.append(float(self.module.weight.detach()))
        return self.module.weight.sum(), {}

    def evaluate(self, _: int):
        self.measured.append(float(self.module.weight.detach()))
        return {"loss": self.measured[-1]}


def test_the_result_is_the_mean_of_the_last_weights(tmp_path: Path) -> None:
    objective = _Walking()
    recipe = Optimisation(learning_rate=0.1, warmup=0.0, average=0.3, precision="fp32")
    train(objective, run_options(tmp_path, Schedule(log=1)), Recipe(optimisation=recipe))
    last = float(torch.load(tmp_path / "state.pt", weights_only=True)["module"]["weight"])
    expected = np.mean([*objective.before[8:], last])  # after steps 8, 9 and 10
    assert float(objective.module.weight.detach()) == pytest.approx(expected, rel=1e-5)
    assert last < expected, "the weight falls, so its mean lies above"
    assert read_log(tmp_path)[-1]["held_out_loss"] == pytest.approx(expected, rel=1e-4)
    again = _Walking()
    train(again, run_options(tmp_path, Schedule(log=1)), Recipe(optimisation=recipe))
    assert float(again.module.weight.detach()) == pytest.approx(expected, rel=1e-5), (
        "a finished run gives the same"
    )


def test_a_checkpoint_is_written_when_time_has_passed(tmp_path: Path) -> None:
    """With checkpoints every million steps, a stop after any step loses no step if no second may
    pass without one.
    """

    class Stopping(_Walking):
        def loss(self, batch: _Walking):
            if len(self.before) == 4:
                raise StopAt
            return super().loss(batch)

    recipe = Optimisation(learning_rate=0.1, precision="fp32")
    for seconds, kept in ((0.0, True), (3600.0, False)):
        folder = tmp_path / str(seconds)
        schedule = Schedule(checkpoint=1_000_000, checkpoint_seconds=seconds)
        with pytest.raises(StopAt):
            train(Stopping(), run_options(folder, schedule), Recipe(optimisation=recipe))
        assert (folder / "state.pt").exists() == kept
    assert torch.load(tmp_path / "0.0/state.pt", weights_only=True)["step"] == 4


def test_embeddings_and_heads_have_their_own_learning_rates() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForPreTraining(BertConfig(**sizes, num_hidden_layers=2, vocab_size=60))
    recipe = Optimisation(
        learning_rate=1e-3,
        embedding_learning_rate=2e-3,
        head_learning_rate=3e-3,
        weight_decay=0.1,
    )
    optimizer = make_optimizer(model, recipe)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_rate: dict[tuple[float, float], set[str]] = {}
    for group in optimizer.param_groups:
        key = (group["initial_lr"], group["weight_decay"])
        by_rate[key] = {names[id(parameter)] for parameter in group["params"]}
    assert sum(map(len, by_rate.values())) == len(names), "each once"
    layers = {name for name in names.values() if name.startswith("bert.encoder.")}
    matrices = {name for name in layers if name.endswith("weight") and "LayerNorm" not in name}
    embeddings = {name for name in names.values() if name.startswith("bert.embeddings.")}
    tables = {name for name in embeddings if "LayerNorm" not in name}
    assert by_rate[1e-3, 0.1] == matrices
    assert by_rate[1e-3, 0.0] == layers - matrices
    assert by_rate[2e-3, 0.1] == tables
    assert by_rate[2e-3, 0.0] == embeddings - tables
    heads = set(names.values()) - layers - embeddings
    assert by_rate[3e-3, 0.1] | by_rate[3e-3, 0.0] == heads


def learning_rates(steps: int, recipe: Optimisation) -> list[float]:
    """The rates of all steps."""
    return [recipe.learning_rate * schedule_factor(step, steps, recipe) for step in range(steps)]


def test_the_rate_is_constant_between_warm_up_and_decay() -> None:
    recipe = Optimisation(learning_rate=0.5, warmup=0.1, decay=0.2)
    rates = learning_rates(1000, recipe)
    assert rates[49] == pytest.approx(0.25)
    assert rates[100:801] == [0.5] * 701
    assert rates[900] == pytest.approx(0.25)
    assert rates[-1] == pytest.approx(0.5 / 200)
    np.testing.assert_allclose(np.diff(rates[801:]), -0.5 / 200, rtol=1e-6)


def test_decay_spares_biases_and_layer_norms() -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Embedding(3, 4)
    )
    decayed, spared = make_optimizer(module, Optimisation(weight_decay=0.1)).param_groups
    assert decayed["weight_decay"] == 0.1
    assert spared["weight_decay"] == 0
    assert {p.shape for p in decayed["params"]} == {(4, 4), (3, 4)}
    assert len(spared["params"]) == 3


def test_the_learning_rate_rises_and_falls_in_straight_lines() -> None:
    for steps, warmup in ((10, 0.9), (10, 0.5), (30, 0.1), (100, 0.06), (7, 0.0)):
        recipe = Optimisation(learning_rate=0.5, warmup=warmup)
        assert max(learning_rates(steps, recipe)) <= 0.5
    recipe = Optimisation(learning_rate=0.5, warmup=0.1)
    rates = learning_rates(1000, recipe)
    assert rates[0] == pytest.approx(0.005)
    assert max(rates) == pytest.approx(0.5)
    assert rates.index(max(rates)) in (99, 100)
    assert rates[-1] == pytest.approx(0.5 / 900)
    np.testing.assert_allclose(np.diff(rates[:99]), 0.005, rtol=1e-6)
    np.testing.assert_allclose(np.diff(rates[101:]), -0.5 / 900, rtol=1e-6)
