"""Training at a size of seconds: it learns, it goes on as if never stopped, and what it leaves is a
checkpoint as any other.
"""

import itertools
import json
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
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import (
    AutoTokenizer,
    BertForPreTraining,
    BertModel,
    DistilBertForMaskedLM,
    PreTrainedModel,
)

from cloze.export.errors import DataError, TrainError
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.load.sentence_transformers import POOLING_FLAGS
from cloze.export.measure.audit import SentencePair, preferences
from cloze.export.measure.evaluate import EvaluationData, evaluate, open_subject
from cloze.export.measure.masked_words import (
    Sentence,
    complete,
    read_sentences,
)
from cloze.export.measure.pairs import ScoredPair, similarity
from cloze.export.measure.scorer import (
    head_arrays,
    score_masks,
)
from cloze.export.model import Model
from cloze.export.publish import ExportOptions, export
from cloze.export.train.batches import TextBatch
from cloze.export.train.corpus import Corpus
from cloze.export.train.distill import distill, kept_layers, make_student
from cloze.export.train.embedding import (
    EmbeddingData,
    EmbeddingFiles,
    EmbeddingObjective,
    finetune_embedding,
)
from cloze.export.train.examples import UNPAIRED, SentenceObjective
from cloze.export.train.loop import train
from cloze.export.train.objectives import MaskedText, SpanBoundary
from cloze.export.train.optimisation import learning_rate, make_optimizer, optimizer_step
from cloze.export.train.pretrain import fill_positions, pretrain
from cloze.export.train.progress import Progress, read_log
from cloze.export.train.recipe import (
    DistilledText,
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
from cloze.export.train.save import save_checkpoint
from cloze.export.train.task_recipe import LabelsRecipe, TagsRecipe, TasksRecipe
from cloze.model_store import Store
from cloze.model_store.heads import Pooling
from cloze.model_store.manifest import Precision, Weights
from cloze.model_store.sequences import SpecialTokens
from tests.training import (
    ACTS,
    PEOPLE,
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


def test_it_learns(trained: Path) -> None:
    log = read_log(trained.parent)
    assert log[-1]["loss"] < 0.6 * log[0]["loss"]
    assert (
        log[-1]["held_out_accuracy"] > 0.3
    )  # person and place can be told from the rest, the act cannot
    assert log[-1]["step"] == 500
    assert log[-1]["tokens_seen"] > log[0]["tokens_seen"] > 0
    png = (trained.parent / "curves.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    card = (trained / "README.md").read_text()
    assert "stories.txt" in card
    assert '"seed": 1' in card


def theirs(
    folder: Path, kind: type[PreTrainedModel]
) -> tuple[PreTrainedModel, dict[str, list[str]]]:
    model, report = kind.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    return model.eval(), report


@torch.no_grad()
def test_transformers_reads_the_checkpoint_alike(trained: Path) -> None:
    model, report = theirs(trained, BertForPreTraining)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ours = load_checkpoint(str(trained)).model
    batch = AutoTokenizer.from_pretrained(trained)(
        TEXT, "An owl saw the moon.", return_tensors="pt"
    )
    hidden = ours(batch["input_ids"], batch["token_type_ids"])
    expected = model(**batch)
    assert ours.masked_lm is not None
    assert ours.next_sentence is not None
    torch.testing.assert_close(
        ours.masked_lm(hidden[0]), expected.prediction_logits[0], atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        ours.next_sentence(hidden[:, 0]), expected.seq_relationship_logits, atol=1e-4, rtol=1e-4
    )


def test_one_seed_gives_one_result(tmp_path: Path) -> None:
    first, second, other = (
        load_file(
            run(tmp_path / name, tiny_recipe(steps=6).model_copy(update={"seed": seed}))
            / "model.safetensors"
        )
        for name, seed in (("first", 1), ("second", 1), ("other", 2))
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


class StopAt(RuntimeError):
    """A stop in the middle of a run."""


EVERYTHING = {
    "average": 0.6,
    "decay": 0.5,
    "embedding_learning_rate": 1e-3,
    "head_learning_rate": 2e-3,
}


@pytest.mark.parametrize(
    ("pretraining", "optimisation", "accumulation"),
    [
        ({}, {}, 2),
        ({"method": "rtd", "sentence": "none"}, {}, 1),
        ({"rate": 0.3, "final_rate": 0.15}, EVERYTHING, 2),
    ],
    ids=["masked", "replaced", "every field"],
)
def test_going_on_equals_not_stopping(
    tmp_path: Path,
    pretraining: dict[str, object],
    optimisation: dict[str, object],
    accumulation: int,
) -> None:
    """Stopped at several steps, between checkpoints and phases; dropout is on."""
    recipe = tiny_recipe(steps=10, **pretraining)
    changed = recipe.optimisation.model_copy(update={"accumulation": accumulation} | optimisation)
    recipe = recipe.model_copy(update={"optimisation": changed})
    straight = load_file(run(tmp_path / "straight", recipe) / "model.safetensors")

    interrupted = tmp_path / "interrupted"
    for stop in (3, 9, 16):
        with pytest.raises(StopAt):
            _run_until(interrupted, recipe, stop)
    resumed = load_file(run(interrupted, recipe) / "model.safetensors")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    steps = [line["step"] for line in read_log(interrupted)]
    assert steps == sorted(set(steps))


def _run_until(folder: Path, recipe: PretrainRecipe, stop: int) -> None:
    """As a kill does: whatever was not in a checkpoint is lost."""
    real = torch.nn.utils.clip_grad_norm_
    calls = 0
    state = folder / "state.pt"
    done = int(torch.load(state, weights_only=True)["step"]) if state.exists() else 0

    def stopping(*arguments: object, **named: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if done + calls > stop:
            raise StopAt
        return real(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", stopping)
        run(folder, recipe)


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
            vocabulary=tmp_path / "vocabulary",
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


def test_pre_training_goes_on_from_a_checkpoint(
    trained: Path, stories: Path, tmp_path: Path
) -> None:
    """It begins where that ended: as good at its first steps, with that tokenizer, those sizes and
    those positions.
    """
    recipe = further_recipe()
    further = pretrain([stories], recipe, run_options(tmp_path / "further"), source=str(trained))
    first, last_before = read_log(further.parent)[0], read_log(trained.parent)[-1]
    assert first["masked_loss"] < last_before["masked_loss"] + 0.5
    assert first["masked_loss"] < read_log(trained.parent)[0]["masked_loss"] / 2
    assert (further / "tokenizer.json").read_text() == (trained / "tokenizer.json").read_text()
    before, after = (load_file(folder / "model.safetensors") for folder in (trained, further))
    assert before.keys() == after.keys()
    assert str(trained) in (further / "README.md").read_text()
    with pytest.raises(TrainError, match="another checkpoint"):
        pretrain(
            [stories],
            recipe,
            run_options(tmp_path / "further"),
            source=str(further),
        )


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
            source=str(trained),
        )


def test_a_batch_of_single_sentences_has_no_pair_to_learn_from(
    trained: Path, stories: Path, tmp_path: Path
) -> None:
    """A mean over no pair would be no number, and would end the run."""
    recipe = further_recipe(phases=[Phase(tokens=32, sequences=2, steps=8, single=0.99)])
    pretrain([stories], recipe, run_options(tmp_path), source=str(trained))
    losses = [line["loss"] for line in read_log(tmp_path)]
    assert all(math.isfinite(loss) for loss in losses)


def test_a_pair_weighs_the_same_beside_single_sentences(trained: Path) -> None:
    module = MaskedText(load_checkpoint(str(trained)).model, Pretraining()).eval()
    ids = torch.randint(5, 50, (4, 12))

    def sentence_loss(labels: list[int]) -> Tensor:
        batch = TextBatch(
            input_ids=ids,
            token_type_ids=torch.zeros_like(ids),
            attention_mask=torch.ones_like(ids, dtype=torch.bool),
            first_tokens=torch.full((4,), 12),
            positions=torch.tensor([1]),
            labels=torch.tensor([7]),
            spans=torch.tensor([[1, 1]]),
            next_labels=torch.tensor(labels),
        )
        with torch.inference_mode():
            return module(batch)[1]["sentence_loss"]

    both = [sentence_loss([1, UNPAIRED, UNPAIRED, UNPAIRED]), sentence_loss([UNPAIRED, 0, 1, 0])]
    torch.testing.assert_close(sentence_loss([1, 0, 1, 0]), sum(both))


def tasks_of(folder: Path) -> list[str]:
    """Return the tasks that a checkpoint is exported for."""
    return [head.task for head in load_checkpoint(str(folder)).default_heads]


def write_encoder(folder: Path, trained: Path, **recipe: object) -> Path:
    """The encoder of ``trained`` as a sentence-transformer without heads."""
    checkpoint = load_checkpoint(str(trained))
    model = Model(checkpoint.model.config)
    model.load_state_dict(checkpoint.model.encoder.state_dict(prefix="encoder."))
    save_checkpoint(model, checkpoint.tokenizer, folder, embedding=EmbeddingRecipe(**recipe))  # type: ignore[arg-type]
    pooling = json.loads((folder / "1_Pooling/config.json").read_text())
    assert sum(value is True for value in pooling.values()) == 1
    assert all(isinstance(pooling[flag], bool) for flag in POOLING_FLAGS)
    return folder


def embed_all(source: str, stories: Path) -> torch.Tensor:
    checkpoint = load_checkpoint(source)
    tokenizer = checkpoint.tokenizer.tokenizer
    rows = [tokenizer.encode(line).ids[:30] for line in stories.read_text().split("\n\n")[:20]]
    with torch.no_grad():
        vectors = [checkpoint.recipe.pool(checkpoint.model(torch.tensor([ids]))) for ids in rows]
    return torch.nn.functional.normalize(torch.cat(vectors), dim=1)


def test_heads_are_created_and_embeddings_kept(
    trained: Path, stories: Path, tmp_path: Path
) -> None:
    """From an encoder alone: it says which heads are new, learns them, stays what it was for
    embeddings, exports as one bundle.
    """
    source = write_encoder(tmp_path / "encoder", trained, max_tokens=24)
    assert tasks_of(source) == ["embed", "embed-all"]
    before = embed_all(str(source), stories)
    cosines, said = {}, []
    for keep in (True, False):
        recipe = further_recipe(
            pretraining=Pretraining(
                keep_embeddings=keep, embedding_weight=50.0, rate=0.3, final_rate=0.15
            ),
            phases=[Phase(tokens=40, sequences=8, steps=60)],
        )
        folder = tmp_path / str(keep)
        result = pretrain(
            [stories], recipe, run_options(folder, report=said.append), source=str(source)
        )
        cosines[keep] = float((before * embed_all(str(result), stories)).sum(1).mean())
    assert (
        said[0]
        == "heads that the checkpoint does not have, with random weights: masked_lm, next_sentence"
    )
    assert cosines[True] > 0.97
    assert cosines[True] > cosines[False] + 0.02
    recipe = further_recipe(
        pretraining=Pretraining(keep_embeddings=True, embedding_weight=50.0),
        phases=[Phase(tokens=40, sequences=8, steps=40)],
    )
    result = pretrain(
        [stories],
        recipe,
        run_options(tmp_path / "back"),
        source=str(tmp_path / "False" / "checkpoint"),
        embeddings_from=str(source),
    )
    returned = float((before * embed_all(str(result), stories)).sum(1).mean())
    assert returned > cosines[False] + 0.01, "a second run learns the original's embeddings again"
    kept = tmp_path / "True"
    log = read_log(kept)
    assert log[0]["embedding_cosine"] > 0.9, "at the start it is the original"
    assert log[-1]["held_out_embedding_cosine"] > 0.97
    assert log[-1]["masked_loss"] < log[0]["masked_loss"]
    checkpoint = load_checkpoint(str(kept / "checkpoint"))
    assert checkpoint.recipe == EmbeddingRecipe(max_tokens=24)
    bundle = export(str(kept / "checkpoint"), "kept", Store(tmp_path / "store"))
    assert set(bundle.manifest.tasks) == {"fill-mask", "nsp", "embed", "embed-all"}
    assert bundle.manifest.embedding is not None
    assert bundle.manifest.embedding.normalize


def test_pooling_and_prompts_of_the_source_are_kept(
    trained: Path, stories: Path, tmp_path: Path
) -> None:
    recipe = EmbeddingRecipe(
        Pooling.CLS,
        normalize=False,
        max_tokens=16,
        prompts={"query": "q: "},
        default_prompt="query",
    )
    fields = {
        "pooling": recipe.pooling,
        "normalize": False,
        "max_tokens": 16,
        "prompts": recipe.prompts,
        "default_prompt": "query",
    }
    source = write_encoder(tmp_path / "encoder", trained, **fields)
    further = further_recipe(phases=[Phase(tokens=40, sequences=4, steps=2)])
    result = pretrain(
        [stories], further, run_options(tmp_path / "run"), source=str(source), vocabulary=trained
    )  # its own vocabulary may be named
    assert load_checkpoint(str(result)).recipe == recipe
    model = SentenceTransformer(str(result), device="cpu")
    assert model.max_seq_length == 16
    assert model.prompts["query"] == "q: "
    keeping = further_recipe(pretraining=Pretraining(keep_embeddings=True))
    with pytest.raises(
        TrainError,
        match=r"the mean of the hidden states, but the checkpoint's embedding is another \(cls",
    ):
        pretrain([stories], keeping, run_options(tmp_path / "other"), source=str(source))


def test_a_run_ends_with_guesses_at_the_text_itself(tmp_path: Path) -> None:
    """What it shows is of the stories: of ten words in a row that a mask stands among, most are as
    some story has them.
    """
    said: list[str] = []
    text = write_stories(tmp_path / "stories.txt")
    pretrain([text], tiny_recipe(steps=60), run_options(tmp_path, report=said.append))
    shown = [line for line in said if "____" in line]
    words = set(re.findall(r"[a-z]+", text.read_text().lower()))
    assert shown
    for line, answer in zip(shown, (line for line in said if "guessed" in line), strict=True):
        seen = re.findall(r"[a-z]+", line.split("\n")[0])
        assert np.mean([word in words for word in seen]) > 0.7, line
        assert (found := re.search(r"was '(##)?(\w+|\W)'", answer)) is not None
        assert found[2] in words or found[2] in " ".join(words) or found[2] == ".", answer
    pairs = {
        f"{a} {b}" for a, b in itertools.pairwise(re.findall(r"[a-z]+", text.read_text().lower()))
    }
    neighbours = [
        f"{a} {b}"
        for line in shown
        for a, b in itertools.pairwise(re.findall(r"[a-z]+", line.split("\n")[0]))
    ]
    assert np.mean([pair in pairs for pair in neighbours]) > 0.5, shown


def test_fine_tuning_sees_each_pair_once_an_epoch_however_it_accumulates() -> None:
    pairs = [([2, number, 3], [2, number, 3], 1.0) for number in range(10, 74)]
    for accumulation in (1, 2, 4):
        recipe = EmbedRecipe(
            optimisation=Optimisation(accumulation=accumulation),
            contrastive_steps=3,
            contrastive_sequences=4,
            epochs=2,
            sequences=8,
        )
        corpus = Corpus(np.arange(60, dtype=np.uint16), np.arange(0, 61, 6), np.array([0, 10]))
        data = EmbeddingData(
            sentences=corpus, pairs=pairs, text=None, special=SpecialTokens(2, 3, 4)
        )
        objective = EmbeddingObjective(torch.nn.Module(), recipe, data, held_out_figures=dict)
        seen = [
            int(token)
            for step in range(3, objective.steps)
            for part in range(accumulation)
            for token in objective.batch(step, part).input_ids[::2, 1]
        ]
        assert sorted(seen) == sorted(2 * list(range(10, 74)))


def test_a_head_that_tells_order_is_not_kept_as_one_of_next_sentences(tmp_path: Path) -> None:
    checkpoint = run(tmp_path, tiny_recipe(steps=3, sentence="sop"))
    assert tasks_of(checkpoint) == ["fill-mask", "embed", "embed-all"]


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
    model = load_checkpoint(str(trained)).model
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
    layers = {name for name in names.values() if name.startswith("encoder.layers.")}
    matrices = {name for name in layers if name.endswith("weight") and "norm" not in name}
    embeddings = {name for name in names.values() if name.startswith("encoder.embeddings.")}
    tables = {name for name in embeddings if "norm" not in name}
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


def test_new_positions_begin_as_copies(trained: Path) -> None:
    model = load_checkpoint(str(trained)).model
    positions = model.encoder.embeddings.position.weight
    before = positions.detach().clone()
    fill_positions(model, 5)
    assert torch.equal(positions[:5], before[:5])
    assert torch.equal(positions[5:9], before[1:5])
    assert torch.equal(positions[9:13], before[1:5])
    # What the longest phase never used is filled at the end of a run.
    assert torch.equal(before[40:64], before[1:25])


# ---- other objectives


@pytest.mark.parametrize(
    "pretraining",
    [
        {"unit": "whole-word", "sentence": "sop"},
        {"unit": "span", "span_boundary": True, "sentence": "none"},
        {"dynamic": False, "sentence": "none"},
        {"method": "rtd", "sentence": "none"},
    ],
    ids=["whole words, sentence order", "spans and their boundaries", "static", "replaced tokens"],
)
def test_every_objective_learns(tmp_path: Path, pretraining: dict[str, object]) -> None:
    checkpoint = run(tmp_path / "run", tiny_recipe(steps=80, **pretraining))
    log = read_log(tmp_path / "run")
    names = [
        name
        for name in log[0]
        if name.endswith("loss") and name not in ("sentence_loss", "finding_loss")
    ]
    for name in names:
        assert log[-1][name] < 0.9 * log[0][name], name
    if pretraining.get("method") == "rtd":
        assert log[-1]["held_out_accuracy"] > 0.85
        _, report = theirs(checkpoint, BertModel)
        assert not [key for key in report["missing_keys"] if "pooler" not in key]
        bundle = export(str(checkpoint), "found", Store(tmp_path / "store"))
        assert bundle.manifest.tasks == ("embed", "embed-all")


def test_a_boundary_knows_only_what_is_outside_the_span(trained: Path) -> None:
    """Hidden states inside a span must not reach its prediction."""
    model = load_checkpoint(str(trained)).model
    boundary = SpanBoundary(model).eval()
    rows = torch.randn(12, 32)
    positions = torch.tensor([3, 4, 5, 8])
    spans = torch.tensor([[3, 5], [3, 5], [3, 5], [8, 8]])

    class Batch:
        pass

    batch = Batch()
    batch.positions, batch.spans = positions, spans
    before = boundary(rows, batch)
    inside = rows.clone()
    inside[[3, 4, 5, 8]] += 1
    torch.testing.assert_close(boundary(inside, batch), before)
    outside = rows.clone()
    outside[6] += 1
    assert not torch.equal(boundary(outside, batch)[:3], before[:3])
    assert not torch.equal(before[0], before[1])  # the place inside the span counts


# ---- fine-tuning


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.csv")


@pytest.fixture(scope="module")
def embedded(
    trained: Path, stories: Path, pairs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    recipe = EmbedRecipe(
        optimisation=Optimisation(learning_rate=2e-3),
        contrastive_steps=10,
        contrastive_sequences=16,
        contrastive_tokens=24,
        epochs=5,
        sequences=16,
        tokens=32,
        text_weight=1.0,
        text_sequences=8,
        held_out=0.1,
    )
    files = EmbeddingFiles(pairs=[pairs], held_out_pairs=[pairs], text=[stories])
    folder = tmp_path_factory.mktemp("embedded")
    return finetune_embedding(str(trained), files, recipe, run_options(folder))


def test_scored_pairs_are_learnt_and_the_heads_are_kept(
    embedded: Path, trained: Path, stories: Path, pairs: Path
) -> None:
    before, after = (figures(str(folder), stories, pairs) for folder in (trained, embedded))
    assert after["sts_spearman"] > before["sts_spearman"]
    assert after["sts_spearman"] > 0.5
    assert after["fill_mask_token_top1"] > before["fill_mask_token_top1"] - 0.15
    assert after["nsp_accuracy"] > before["nsp_accuracy"] - 0.15


def figures(
    source: str, stories: Path, pairs: Path | None, store: Path = Path()
) -> dict[str, float]:
    subject = open_subject(source, Store(store), CPU)
    data = EvaluationData(
        [stories], [pairs] if pairs else [], [], held_out=0.1, sequences=60, tokens=32
    )
    with tempfile.TemporaryDirectory() as folder:
        return evaluate(subject, data, Path(folder), quietly)


def test_sentence_transformers_gives_the_same_embeddings(embedded: Path) -> None:
    texts = [TEXT, "An owl.", "The old king told a story in the green house."]
    expected = SentenceTransformer(str(embedded), device="cpu").encode(texts)
    checkpoint = load_checkpoint(str(embedded))
    subject = open_subject(str(embedded), Store(Path()), CPU)
    for text, vector in zip(texts, expected, strict=True):
        ids = np.array([checkpoint.tokenizer.tokenizer.encode(text).ids])
        row = head_arrays(subject.scorer, "embedding", ids)[0]
        np.testing.assert_allclose(row / np.linalg.norm(row), vector, atol=1e-5)


def test_similarity_is_scipys(embedded: Path) -> None:
    subject = open_subject(str(embedded), Store(Path()), CPU)
    texts = [
        f"{person.capitalize()} {act} {place}."
        for person in PEOPLE
        for act in ACTS
        for place in PLACES
    ]
    rng = np.random.default_rng(1)
    scored = [ScoredPair(*rng.choice(texts, 2), float(rng.integers(6))) for _ in range(40)]
    vectors = SentenceTransformer(str(embedded), device="cpu").encode(
        [t for p in scored for t in (p.first, p.second)]
    )
    cosines = (vectors[0::2] * vectors[1::2]).sum(1)
    expected = spearmanr(np.round(cosines, 5), [pair.score for pair in scored]).statistic
    assert similarity(scored, subject.tokenizer.tokenizer, subject.scorer, 32) == pytest.approx(
        expected, abs=0.01
    )


def test_bundle_and_checkpoint_are_measured_alike(
    embedded: Path, stories: Path, pairs: Path, tmp_path: Path
) -> None:
    export(str(embedded), "embedded", Store(tmp_path))
    checkpoint = figures(str(embedded), stories, pairs)
    bundle = figures("bundle:embedded", stories, pairs, tmp_path)
    assert len(checkpoint) == 9
    assert bundle == pytest.approx(checkpoint, abs=1e-3, rel=1e-3)


# ---- distillation


@pytest.mark.parametrize(
    ("layers", "kept"),
    [(12, [0, 2, 4, 7, 9, 11]), (6, [0, 2, 5]), (4, [0, 3]), (2, [1]), (1, [0])],
)
def test_half_of_the_layers_are_kept_with_the_first_and_the_last(
    layers: int, kept: list[int]
) -> None:
    assert kept_layers(layers, max(1, layers // 2)) == kept


def test_the_student_starts_from_half_of_the_layers_of_the_teacher(trained: Path) -> None:
    teacher = load_checkpoint(str(trained)).model
    student = make_student(teacher, dropout=0.0)
    assert len(student.encoder.layers) == len(teacher.encoder.layers) // 2
    kept = kept_layers(len(teacher.encoder.layers), len(student.encoder.layers))
    for number, layer in zip(kept, student.encoder.layers, strict=True):
        for name, tensor in layer.state_dict().items():
            assert torch.equal(tensor, teacher.encoder.layers[number].state_dict()[name])
    assert student.encoder.embeddings.token_type is None
    assert student.next_sentence is None
    # What enters the first layer is what enters the teacher's, since token type 0 moved into the
    # positions.
    ids = torch.randint(5, 100, (2, 9))
    torch.testing.assert_close(
        student.encoder.embeddings(ids, None), teacher.encoder.embeddings(ids, None)
    )
    # The copy is one: training the student leaves the teacher as it was.
    assert (
        student.encoder.layers[0].up.weight.data_ptr()
        != teacher.encoder.layers[0].up.weight.data_ptr()
    )


def test_distillation_keeps_most_of_the_teacher(
    trained: Path, stories: Path, tmp_path: Path
) -> None:
    recipe = DistillRecipe(
        phases=[Phase(tokens=32, sequences=16, steps=120)],
        optimisation=Optimisation(learning_rate=3e-3),
        held_out=0.1,
        dropout=0.0,
    )
    before = load_file(trained / "model.safetensors")
    checkpoint = distill(str(trained), [stories], recipe, run_options(tmp_path / "run"))
    after = load_file(trained / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    log = read_log(tmp_path / "run")
    assert log[-1]["held_out_soft_loss"] < log[0]["soft_loss"]
    assert log[-1]["held_out_agreement"] > 0.7
    _, report = theirs(checkpoint, DistilBertForMaskedLM)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    teacher, student = (figures(str(folder), stories, None) for folder in (trained, checkpoint))
    assert student["fill_mask_token_top1"] > 0.8 * teacher["fill_mask_token_top1"]


def test_distillation_keeps_embeddings(trained: Path, stories: Path, tmp_path: Path) -> None:
    """With the term, the student's embeddings stay nearer to the teacher's; its recipe stays."""
    original = load_checkpoint(str(trained))
    teacher = tmp_path / "teacher"
    recipe_of_teacher = EmbeddingRecipe(max_tokens=24)
    save_checkpoint(original.model, original.tokenizer, teacher, embedding=recipe_of_teacher)
    targets = embed_all(str(teacher), stories)
    cosines = {}
    for keep in (True, False):
        recipe = DistillRecipe(
            pretraining=DistilledText(keep_embeddings=keep, embedding_weight=50.0),
            phases=[Phase(tokens=32, sequences=8, steps=60)],
            optimisation=Optimisation(learning_rate=3e-3),
            held_out=0.1,
            dropout=0.0,
        )
        run = run_options(tmp_path / str(keep))
        checkpoint = distill(str(teacher), [stories], recipe, run)
        cosines[keep] = float((targets * embed_all(str(checkpoint), stories)).sum(1).mean())
    assert cosines[True] > cosines[False] + 0.01
    kept = tmp_path / "True"
    assert read_log(kept)[-1]["held_out_embedding_cosine"] > 0.9
    assert load_checkpoint(str(kept / "checkpoint")).recipe == recipe_of_teacher


def test_a_student_continues_with_another_teacher(
    trained: Path, stories: Path, tmp_path: Path
) -> None:
    """One step at a rate of nearly nothing leaves the weights where the first run left them."""

    def recipe(steps: int, rate: float) -> DistillRecipe:
        return DistillRecipe(
            phases=[Phase(tokens=32, sequences=16, steps=steps)],
            optimisation=Optimisation(learning_rate=rate, weight_decay=0.0),
            held_out=0.1,
            dropout=0.0,
        )

    first = distill(str(trained), [stories], recipe(20, 3e-3), run_options(tmp_path / "first"))
    options = run_options(tmp_path / "second")
    second = distill(str(trained), [stories], recipe(1, 1e-9), options, str(first))
    before, after = (load_file(folder / "model.safetensors") for folder in (first, second))
    fresh = make_student(load_checkpoint(str(trained)).model, 0.0).encoder.layers[0].up.weight
    name = next(name for name in before if name.endswith("0.ffn.lin1.weight"))
    assert not torch.allclose(before[name], fresh, atol=1e-3)
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, atol=1e-6, rtol=0)


def test_a_teacher_without_a_masked_lm_head_is_refused(
    checkpoints: dict[str, Path], stories: Path, tmp_path: Path
) -> None:
    recipe = DistillRecipe(phases=[Phase(tokens=32, sequences=4, steps=1)])
    with pytest.raises(TrainError, match="masked-language-model head"):
        distill(str(checkpoints["bert-qa"]), [stories], recipe, run_options(tmp_path))


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
