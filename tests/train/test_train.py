"""The loop of training: steps, rates, averages, checkpoints, and the recipes of the package."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForPreTraining, DistilBertConfig

from cloze.export.errors import TrainError
from cloze.export.train import recipe as recipes
from cloze.export.train.batches import PaddedBatch, padded
from cloze.export.train.card import Run, describe
from cloze.export.train.loop import train
from cloze.export.train.optimisation import make_optimizer, schedule_factor
from cloze.export.train.progress import read_log
from cloze.export.train.recipe import RECIPES, Optimisation, Recipe, load_recipe
from cloze.export.train.rows import model_inputs
from cloze.export.train.run_options import RunOptions, Schedule
from tests.support.fine_tuning import Stop
from tests.support.training import quietly

pytestmark = pytest.mark.usefixtures("one_thread")


def options(run_dir: Path, schedule: Schedule) -> RunOptions:
    return RunOptions(run_dir, torch.device("cpu"), quietly, schedule)


DEFAULT_MODELS = Path(__file__).parents[2] / "scripts/recipes"
FILES = [*sorted(RECIPES.glob("*.toml")), *sorted(DEFAULT_MODELS.glob("*.toml"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_recipes_of_the_package_and_of_the_default_models_are_recipes(file: Path) -> None:
    kinds = {"pretrain": recipes.PretrainRecipe, "distill": recipes.DistillRecipe}
    special = {"qa": recipes.QuestionsRecipe, "embed": recipes.EmbedRecipe}
    special |= {"classify": recipes.LabelsRecipe, "tokens": recipes.TagsRecipe}
    special |= {"tasks": recipes.TasksRecipe}
    command, what, *_ = f"{file.stem}-".split("-")
    kind = kinds.get(command) or special[what]
    assert load_recipe(str(file), kind, seed=7).seed == 7


def test_two_tasks_of_questions_are_refused() -> None:
    tasks = [{"name": name, "kind": "qa", "questions": ["x"]} for name in "ab"]
    with pytest.raises(ValueError, match="a and b are both of kind qa"):
        recipes.TasksRecipe.model_validate({"steps": 1, "task": tasks})


def test_token_types_are_for_models_that_have_them() -> None:
    batch = padded([np.array([1])], [np.array([0])], 1)
    for config, types in ((BertConfig(), True), (DistilBertConfig(), False)):
        assert ("token_type_ids" in model_inputs(PaddedBatch(*batch), config)) == types


class _Walking:
    """An objective whose loss moves one weight; it remembers the weight before each step."""

    tokens = 1

    def __init__(self, steps: int = 10) -> None:
        self.steps, self.module = steps, torch.nn.Module()
        self.module.weight = torch.nn.Parameter(torch.zeros(3, 1))
        self.before: list[float] = []

    @property
    def weight(self) -> float:
        return float(self.module.weight.detach().sum())

    def batch(self, _: int, __: int) -> Any:
        return self

    def to(self, _: torch.device) -> Any:
        return self

    def loss(self, _: Any) -> Any:
        self.before.append(self.weight)
        return self.module.weight.sum(), {}

    def evaluate(self, _: int) -> dict[str, float]:
        return {"loss": self.weight}


def test_accumulated_batches_are_one_large_batch(tmp_path: Path) -> None:
    """The gradient of four quarters equals that of the whole."""
    x = torch.arange(24.0).view(8, 3) / 24

    class Fit(_Walking):
        def batch(self, _: int, part: int) -> Any:
            self.x = x.chunk(self.parts)[part]
            return self

        def loss(self, _: Any) -> Any:
            return ((self.x @ self.module.weight - 1) ** 2).mean(), {}

    def fitted(parts: int) -> torch.Tensor:
        objective = Fit(steps=4)
        objective.parts = parts
        recipe = Optimisation(learning_rate=0.1, accumulation=parts, precision="fp32")
        train(objective, options(tmp_path / str(parts), Schedule()), Recipe(optimisation=recipe))
        return objective.module.weight.detach()

    torch.testing.assert_close(fitted(1), fitted(4))


def test_each_step_has_the_rate_of_the_schedule_and_a_card_is_of_one_step(tmp_path: Path) -> None:
    """The gradient is constant, so AdamW moves each of the three weights by the rate."""
    objective, run = _Walking(), options(tmp_path, Schedule(log=1))
    rates = Optimisation(learning_rate=0.1, warmup=0.5, weight_decay=0.0, precision="fp32")
    recipe = Recipe(optimisation=rates)
    train(objective, run, recipe)
    moved = -np.diff(objective.before) / 3
    np.testing.assert_allclose(moved, learning_rates(10, rates)[:-1], rtol=1e-4)
    card = describe(Run("Walking", None, [], recipe, run, step=4))
    rows = dict(re.findall(r"^\| ([a-z][a-z ]*) \| (.*) \|$", card, re.MULTILINE))
    assert (rows["steps"], rows["tokens seen"]) == ("4", "4")
    assert {"loss", "held out loss"} <= rows.keys()
    assert "learning rate" not in rows


def test_a_weight_that_is_no_number_is_not_saved(tmp_path: Path) -> None:
    objective, recipe = _Walking(), Recipe(optimisation=Optimisation(precision="fp32"))
    objective.module.other = torch.nn.Parameter(torch.tensor([torch.nan]))
    with pytest.raises(TrainError, match="a weight is no number any more at step 10; "):
        train(objective, options(tmp_path, Schedule()), recipe)
    assert not (tmp_path / "state.pt").exists()


def test_the_result_is_the_mean_of_the_last_weights(tmp_path: Path) -> None:
    objective = _Walking()
    recipe = Optimisation(learning_rate=0.1, warmup=0.0, average=0.3, precision="fp32")
    train(objective, options(tmp_path, Schedule(log=1)), Recipe(optimisation=recipe))
    last = float(torch.load(tmp_path / "state.pt", weights_only=True)["module"]["weight"].sum())
    expected = np.mean([*objective.before[8:], last])  # after steps 8, 9 and 10
    assert objective.weight == pytest.approx(expected, rel=1e-5)
    assert last < expected, "the weight falls, so its mean lies above"
    assert read_log(tmp_path)[-1]["held_out_loss"] == pytest.approx(expected, rel=1e-4)
    again = _Walking()
    train(again, options(tmp_path, Schedule(log=1)), Recipe(optimisation=recipe))
    assert again.weight == pytest.approx(expected, rel=1e-5), "a finished run gives the same"


def test_a_checkpoint_is_written_when_time_has_passed(tmp_path: Path) -> None:
    """With checkpoints every million steps, a stop after any step loses no step if no second may
    pass without one.
    """

    class Stopping(_Walking):
        def loss(self, batch: Any) -> Any:
            if len(self.before) == 4:
                raise Stop
            return super().loss(batch)

    recipe = Optimisation(learning_rate=0.1, precision="fp32")
    for seconds, kept in ((0.0, True), (3600.0, False)):
        folder = tmp_path / str(seconds)
        schedule = Schedule(checkpoint=1_000_000, checkpoint_seconds=seconds)
        with pytest.raises(Stop):
            train(Stopping(), options(folder, schedule), Recipe(optimisation=recipe))
        assert (folder / "state.pt").exists() == kept
    assert torch.load(tmp_path / "0.0/state.pt", weights_only=True)["step"] == 4


def test_embeddings_and_heads_have_their_own_learning_rates() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForPreTraining(BertConfig(**sizes, num_hidden_layers=2, vocab_size=60))
    rates = {"embedding_learning_rate": 2e-3, "head_learning_rate": 3e-3}
    recipe = Optimisation(learning_rate=1e-3, weight_decay=0.1, **rates)
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


def test_the_learning_rate_rises_and_falls_in_straight_lines() -> None:
    for steps, warmup in ((10, 0.9), (30, 0.1), (7, 0.0)):
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
