"""Training at a size of seconds: it learns, it goes on as if never stopped, and what it leaves is a
checkpoint as any other.
"""

import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import BertForPreTraining

from cloze.export.errors import DataError, TrainError
from cloze.export.measure.audit import SentencePair, preferences
from cloze.export.measure.evaluate import EvaluationData, evaluate, open_subject
from cloze.export.measure.masked_words import (
    Sentence,
    complete,
    read_sentences,
)
from cloze.export.measure.scorer import (
    head_arrays,
    score_masks,
)
from cloze.export.publish import ExportOptions, export
from cloze.export.train.examples import SentenceObjective
from cloze.export.train.folder import open_folder
from cloze.export.train.loop import train
from cloze.export.train.optimisation import learning_rate, make_optimizer, optimizer_step
from cloze.export.train.pretrain import pretrain
from cloze.export.train.progress import Progress, read_log
from cloze.export.train.recipe import (
    DistillRecipe,
    EmbedRecipe,
    Optimisation,
    Phase,
    Pretraining,
    PretrainRecipe,
    QuestionsRecipe,
    Sizes,
    Vocabulary,
    VocabularyRecipe,
)
from cloze.export.train.recipe_files import RECIPES, load_recipe
from cloze.export.train.run_options import Report, RunOptions, Schedule
from cloze.export.train.task_recipe import LabelsRecipe, TagsRecipe, TasksRecipe
from cloze.model_store import Store
from cloze.model_store.manifest import Precision, Weights
from tests.training import (
    PLACES,
    tiny_recipe,
    write_pairs,
    write_stories,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
SCHEDULE = Schedule(log=5, evaluate=20, checkpoint=7)
TEXT = "The captain found a coin by the cold river."


def quietly(_: str) -> None:
    """Nobody listens."""


def run_options(
    run_dir: Path, schedule: Schedule = SCHEDULE, report: Report = quietly
) -> RunOptions:
    return RunOptions(run_dir, CPU, report, schedule)


def run(folder: Path, recipe: PretrainRecipe, schedule: Schedule = SCHEDULE) -> Path:
    folder.mkdir(exist_ok=True)
    return pretrain([write_stories(folder / "stories.txt")], recipe, run_options(folder, schedule))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run long enough to know the stories."""
    return run(tmp_path_factory.mktemp("trained"), tiny_recipe(steps=250))


@pytest.fixture(scope="module")
def stories(trained: Path) -> Path:
    return trained.parent / "stories.txt"


class StopAt(RuntimeError):
    """A stop in the middle of a run."""


def test_a_folder_belongs_to_one_recipe_on_one_text(tmp_path: Path) -> None:
    recipe = tiny_recipe(steps=4)
    before = load_file(run(tmp_path, recipe) / "model.safetensors")
    with pytest.raises(TrainError, match="another recipe"):
        run(tmp_path, tiny_recipe(steps=5))
    other = tmp_path / "other.txt"
    other.write_text((tmp_path / "stories.txt").read_text() + "\n\nAn owl.\n")
    with pytest.raises(TrainError, match="another text"):
        pretrain([other], recipe, run_options(tmp_path))
    with pytest.raises(TrainError, match="another vocabulary"):
        pretrain(
            [tmp_path / "stories.txt"],
            recipe,
            run_options(tmp_path),
            vocabulary=open_folder(str(tmp_path / "vocabulary")),
        )
    after = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def further_recipe(**changes: object) -> PretrainRecipe:
    """What may be said of a run that goes on from a checkpoint."""
    fields = {
        "optimisation": Optimisation(learning_rate=2e-3, precision="fp32"),
        "phases": [Phase(tokens=40, sequences=8, steps=30)],
        "held_out": 0.1,
    }
    return PretrainRecipe(**fields | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"model": Sizes(layers=3)},
            r"\[model\] layers is given, but sizes and vocabulary are the checkpoint's",
        ),
        ({"vocabulary": Vocabulary(size=300)}, "a vocabulary is given, but"),
        (
            {"pretraining": Pretraining(method="rtd", sentence=SentenceObjective.NONE)},
            "not with replaced ones",
        ),
        (
            {"phases": [Phase(tokens=65, sequences=8, steps=3)]},
            "a phase of 65 tokens exceeds the checkpoint's 64 positions",
        ),
    ],
)
def test_what_a_checkpoint_decides_is_not_asked_for(
    changes: dict[str, object], line: str, trained: Path, stories: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainError, match=line):
        pretrain(
            [stories],
            further_recipe(**changes),
            run_options(tmp_path),
            source=open_folder(str(trained)),
        )


DEFAULT_MODELS = Path(__file__).parents[1] / "scripts/recipes"
FILES = [*sorted(RECIPES.glob("*.toml")), *sorted(DEFAULT_MODELS.glob("*.toml"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_recipes_of_the_package_and_of_the_default_models_are_recipes(file: Path) -> None:
    kinds = {"pretrain": PretrainRecipe, "vocabulary": VocabularyRecipe, "distill": DistillRecipe}
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
        train(objective, run_options(folder, Schedule()), seed=1, optimisation=recipe)
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
    objective, said = _Walking(), []
    recipe = Optimisation(learning_rate=0.1, warmup=0.0, average=0.3, precision="fp32")
    train(
        objective, run_options(tmp_path, Schedule(log=1), said.append), seed=1, optimisation=recipe
    )
    last = float(torch.load(tmp_path / "state.pt", weights_only=True)["module"]["weight"])
    expected = np.mean([*objective.before[8:], last])  # after steps 8, 9 and 10
    assert float(objective.module.weight.detach()) == pytest.approx(expected, rel=1e-5)
    assert last < expected, "the weight falls, so its mean lies above"
    assert objective.measured[-2:] == pytest.approx([last, expected], rel=1e-5)
    assert read_log(tmp_path)[-1]["held_out_loss"] == pytest.approx(expected, rel=1e-4)
    assert "weights of the last 3 steps averaged" in said[-1]
    again = _Walking()
    train(again, run_options(tmp_path, Schedule(log=1)), seed=1, optimisation=recipe)
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
            train(Stopping(), run_options(folder, schedule), seed=1, optimisation=recipe)
        assert (folder / "state.pt").exists() == kept
    assert torch.load(tmp_path / "0.0/state.pt", weights_only=True)["step"] == 4


def test_embeddings_and_heads_have_their_own_learning_rates(trained: Path) -> None:
    model = BertForPreTraining.from_pretrained(trained)
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
        key = (group["peak_learning_rate"], group["weight_decay"])
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
    optimizer_step(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [
        g["peak_learning_rate"] / 2 for g in optimizer.param_groups
    ]


def test_the_rate_is_constant_between_warm_up_and_decay() -> None:
    recipe = Optimisation(learning_rate=0.5, warmup=0.1, decay=0.2)
    rates = [learning_rate(step, 1000, recipe) for step in range(1000)]
    assert rates[49] == pytest.approx(0.25)
    assert rates[100:801] == [0.5] * 701
    assert rates[900] == pytest.approx(0.25)
    assert rates[-1] == pytest.approx(0.5 / 200)
    np.testing.assert_allclose(np.diff(rates[801:]), -0.5 / 200, rtol=1e-6)


def test_contention_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two threads for ten seconds: 19 seconds of processor time are all there is to have, 8 are
    not.
    """
    clock = iter([0.0, 0.0, 10.0, 20.0])
    used = iter([0.0, 19.0, 27.0])
    with monkeypatch.context() as patch:
        patch.setattr("cloze.export.train.progress.time.monotonic", lambda: next(clock))
        patch.setattr("cloze.export.train.progress.time.process_time", lambda: next(used))
        progress = Progress(tmp_path, 0, 100_000, threads=2)
        progress.log(1, {"loss": 1.0, "accuracy": 0.5}, tokens=1)
        progress._bar.refresh()
        assert "contended" not in capsys.readouterr().err
        progress.log(2, {"loss": 1.0, "accuracy": 0.5}, tokens=1)
        progress._bar.refresh()
        assert "contended=40%" in capsys.readouterr().err
        line = progress._bar.format_meter(**progress._bar.format_dict | {"ncols": 120})
        bar = re.match(r"  0% ( +) 0/100000 ", line)
        assert bar is not None, line
        assert len(bar[1]) >= 20, "a terminal of 120 columns has room for a bar"
    progress.close()
    assert [line["cpu_share"] for line in read_log(tmp_path)] == [0.95, 0.4]


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
        assert max(learning_rate(step, steps, recipe) for step in range(steps)) <= 0.5
    recipe = Optimisation(learning_rate=0.5, warmup=0.1)
    rates = [learning_rate(step, 1000, recipe) for step in range(1000)]
    assert rates[0] == pytest.approx(0.005)
    assert max(rates) == pytest.approx(0.5)
    assert rates.index(max(rates)) in (99, 100)
    assert rates[-1] == pytest.approx(0.5 / 900)
    np.testing.assert_allclose(np.diff(rates[:99]), 0.005, rtol=1e-6)
    np.testing.assert_allclose(np.diff(rates[101:]), -0.5 / 900, rtol=1e-6)


# ---- other objectives


# ---- fine-tuning


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
    trained: Path, stories: Path, pairs: Path, tmp_path: Path
) -> None:
    export(str(trained), "trained", Store(tmp_path))
    checkpoint = figures(str(trained), stories, pairs)
    bundle = figures("bundle:trained", stories, pairs, tmp_path)
    assert len(checkpoint) == 9
    assert bundle == pytest.approx(checkpoint, abs=1e-3, rel=1e-3)


# ---- distillation


def test_bias_is_the_share_of_stereotypes_that_are_likelier(trained: Path) -> None:
    """Pairs of a sentence as in the stories and the same words in disorder: the model prefers the
    first nearly always.
    """
    rng = np.random.default_rng(0)
    places = rng.choice(PLACES, 40)
    pairs = [
        SentencePair(f"The old king saw the moon {place}.", f"The old king saw a moon {place}.")
        for place in places
    ]
    subject = open_subject(str(trained), Store(Path()), CPU)
    share = preferences(subject, pairs).mean()
    assert share > 0.8
    swapped = [SentencePair(pair.less, pair.more) for pair in pairs]
    assert preferences(subject, swapped).mean() == pytest.approx(1 - share)
    assert preferences(subject, [SentencePair("The owl.", "The owl.")]).tolist() == [0.5]


def test_sentences_count_their_first_word(trained: Path, tmp_path: Path) -> None:
    subject = open_subject(str(trained), Store(Path()), CPU)
    masked = "The old [MASK] saw the moon ."
    (likeliest,) = complete([Sentence(masked, ("x",))], subject.tokenizer, subject.scorer)
    file = tmp_path / "first-words.tsv"
    file.write_text(f"{masked}\tnothing, {likeliest.upper()}\n{masked}\tnothing\n")
    said: list[str] = []
    data = EvaluationData([], [], [], 1.0, sentences=(file,))
    measured = evaluate(subject, data, tmp_path, said.append)
    assert measured == {"first_words": 0.5, "first_words_repeats": 0}
    assert said == [f"right: {masked} {likeliest}", f"wrong: {masked} {likeliest}"]


def test_a_wrong_word_of_the_sentence_is_a_repeat() -> None:
    sentence = Sentence("The Moon is not the [MASK].", ("sun", "not"))
    found = {word: sentence.is_repeated_by(word) for word in ("moon", "not", "sea")}
    assert found == {"moon": True, "not": False, "sea": False}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no mask here\tword", "line 1: a sentence with one"),
        ("[MASK] and [MASK]\tword", "line 1: a sentence with one"),
        ("a [MASK] without words", "line 1: a sentence with one"),
        ("", "holds no sentences"),
    ],
)
def test_bad_sentences_are_refused(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "bad.tsv"
    file.write_text(line)
    with pytest.raises(DataError, match=reason):
        read_sentences(file)
    with pytest.raises(DataError, match="no such file"):
        read_sentences(tmp_path / "nowhere.tsv")


@pytest.mark.parametrize(
    ("name", "count"),
    [("first-impressions", 20), ("further-impressions", 20), ("drawn-sentences", 100)],
)
def test_the_sentences_of_the_project_are_complete(name: str, count: int) -> None:
    assert len(read_sentences(ROOT / "export" / "measure" / f"{name}.tsv")) == count


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
    (_, expected), (_, found) = (
        score_masks(subject.scorer, ids, zeros, position, label, k=1)
        for subject in (bundle, checkpoint)
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(
        head_arrays(checkpoint.scorer, "next_sentence", ids, zeros),
        head_arrays(bundle.scorer, "next_sentence", ids, zeros),
        atol=1e-4,
    )


def test_perplexity_is_that_of_the_true_tokens(trained: Path, stories: Path) -> None:
    """A model that knew nothing would have the vocabulary's size; this one is far below, and not
    below 1.
    """
    measured = figures(str(trained), stories, None)
    assert 1 < measured["fill_mask_token_perplexity"] < 20
    assert measured["fill_mask_token_top1"] <= measured["fill_mask_token_top5"] <= 1
    assert math.isfinite(measured["fill_mask_whole_word_perplexity"])
