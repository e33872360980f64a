"""Fine-tuning for labels, tags and several tasks at once, and one bundle that serves them all."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

from cloze.export.errors import DataError, TrainError
from cloze.export.evaluation.labelled import read_labelled, read_tagged
from cloze.export.families import FAMILIES
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.publish import export
from cloze.export.train.average import average
from cloze.export.train.evaluate import EvaluationData, evaluate, open_subject
from cloze.export.train.joint import draw_tasks, finetune_tasks
from cloze.export.train.label_data import RowFiles, read_label_data
from cloze.export.train.label_tasks import BatchPlan, LabelObjective, finetune_rows
from cloze.export.train.progress import read_log
from cloze.export.train.recipe import Optimisation
from cloze.export.train.run_options import RunOptions, Schedule
from cloze.export.train.task_recipe import LabelSettings, LabelsRecipe, TagsRecipe, TasksRecipe
from cloze.model_store import Store
from cloze.model_store.heads.sequence_classification import SequenceLabels
from cloze.train import train
from tests.serving import running_server
from tests.training import ACTS, PEOPLE, PLACES, quietly, run_options, write_questions
from tests.unit.export.families.test_against_transformers import ids_of, ours, same, save, theirs

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
FAST = Optimisation(learning_rate=5e-3, head_learning_rate=1e-2, precision="fp32")
LABELS: dict[str, Any] = {"optimisation": FAST, "sequences": 16, "tokens": 40, "dropout": 0.0}


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def sentences(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    draw = random.Random(seed)
    return [(draw.choice(PEOPLE), draw.choice(ACTS), draw.choice(PLACES)) for _ in range(count)]


def write_labelled(file: Path, kind: str, count: int = 160) -> Path:
    """Who is in the text? One label, a list, a number, or whether both of a pair are the same."""
    rows: list[dict[str, Any]] = []
    for person, act, place in sentences(count, len(kind)):
        text = f"{person} {act} {place}."
        if kind == "pair":
            other = random.Random(text).choice(PEOPLE)
            label = "same" if other == person else "other"
            rows.append({"text": person, "text_pair": other, "label": label})
        elif kind == "several":
            rows.append({"text": text, "labels": [person, act]})
        elif kind == "number":
            rows.append({"text": text, "label": PEOPLE.index(person) / 5})
        else:
            rows.append({"text": text, "label": person})
    return write_rows(file, rows)


def write_tagged(file: Path, count: int = 160) -> Path:
    """The person and the place are entities."""
    rows = []
    for person, act, place in sentences(count, 9):
        parts = [(person, "PER"), (act, ""), (place, "LOC")]
        tokens, tags = [], []
        for words, kind in parts:
            for at, word in enumerate(words.split()):
                tokens.append(word)
                tags.append(f"{'I' if at else 'B'}-{kind}" if kind else "O")
        rows.append({"tokens": tokens, "tags": tags})
    return write_rows(file, rows)


@pytest.fixture(scope="module", params=["bert", "roberta"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save(request.param, "masked_lm", folder, max_position_embeddings=66)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    save("bert", "masked_lm", folder, max_position_embeddings=66)
    return folder


def measured(checkpoint: str, store: Path, **files: Any) -> dict[str, float]:
    subject = open_subject(checkpoint, Store(store), CPU)
    return evaluate(subject, EvaluationData([], [], [], 1.0, **files), store / "text", quietly)


@pytest.mark.parametrize(
    ("kind", "figure", "least"),
    [("one", "accuracy", 0.9), ("several", "micro_f1", 0.4), ("number", "pearson", 0.8)],
)
def test_labels_are_learnt(
    source: Path, tmp_path: Path, kind: str, figure: str, least: float
) -> None:
    file = write_labelled(tmp_path / "rows.jsonl", kind)
    recipe = LabelsRecipe(**LABELS, epochs=16)
    options = run_options(tmp_path / "run")
    trained = finetune_rows(load_checkpoint(str(source)), RowFiles([file], []), recipe, options)
    assert read_log(trained.parent)[-1][f"held_out_{figure}"] > least
    _check_calibration(trained, file, is_number=kind == "number")
    assert measured(str(trained), tmp_path, labelled=(file,))[f"rows_{figure}"] > least
    network = AutoModelForSequenceClassification.from_pretrained(
        trained, attn_implementation="eager"
    ).eval()
    ids, head = ids_of(network, 9), "sequence_classification"
    assert same(ours(load_checkpoint(str(trained)), head, ids), theirs(network, head, ids))


def _check_calibration(trained: Path, file: Path, *, is_number: bool) -> None:
    """The written weights have the temperature of the held-out rows: theirs is 1."""
    checkpoint = load_checkpoint(str(trained))
    labels = checkpoint.model.options["sequence_classification"]
    assert (labels.temperature is None) == is_number
    if labels.temperature is None or not 0.11 < labels.temperature < 9:
        return
    data = read_label_data(RowFiles([file], []), LabelSettings(tokens=40), quietly)
    objective = LabelObjective(
        checkpoint.model, checkpoint.tokenizer, data, BatchPlan(steps=1, accumulation=1, seed=0)
    )
    again = objective.calibrate()
    assert again is not None
    assert again.temperature == pytest.approx(1, rel=1e-3)


def test_pairs_are_learnt_and_runs_are_averaged(bert: Path, tmp_path: Path) -> None:
    learnt = write_labelled(tmp_path / "pairs.jsonl", "pair")
    runs = []
    for seed in (1, 2):
        recipe = LabelsRecipe(**LABELS, epochs=2, seed=seed, class_weights="balanced")
        options = run_options(tmp_path / f"run-{seed}")
        files = RowFiles([learnt], [learnt])
        runs.append(str(finetune_rows(load_checkpoint(str(bert)), files, recipe, options)))
    mean = average(runs, tmp_path / "mean")
    assert "pairs_matthews" in measured(str(mean), tmp_path, labelled=(learnt,))


def test_a_balanced_weight_raises_a_rare_label(bert: Path, tmp_path: Path) -> None:
    """A constant text: the model learns how often each label occurs, weighted."""
    rows = [{"text": "the owl", "label": "rare" if n % 10 == 0 else "common"} for n in range(160)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    shares = []
    for weights in ("none", "balanced"):
        recipe = LabelsRecipe(**LABELS, epochs=6, class_weights=weights)
        files, options = RowFiles([file], [file]), run_options(tmp_path / weights)
        trained = finetune_rows(load_checkpoint(str(bert)), files, recipe, options)
        model = load_checkpoint(str(trained))
        logits = ours(model, "sequence_classification", torch.tensor([[2, 5, 6, 3]]))
        shares.append(float(torch.as_tensor(logits).flatten().softmax(0)[1]))
    assert shares[0] < 0.25
    assert 0.35 < shares[1] < 0.65


def test_tags_are_learnt_from_lines_and_columns(source: Path, tmp_path: Path) -> None:
    file = write_tagged(tmp_path / "rows.jsonl")
    columns = tmp_path / "rows.conll"
    blocks = [
        "\n".join(f"{word} _ {tag}" for word, tag in zip(row.words, row.tags, strict=True))
        for row in read_tagged([file])
    ]
    columns.write_text("# a comment\n" + "\n\n".join(blocks) + "\n")
    assert [row.tags for row in read_tagged([columns])] == [row.tags for row in read_tagged([file])]
    recipe = TagsRecipe(**LABELS, epochs=16)
    options = run_options(tmp_path / "run")
    files = RowFiles([columns], [file])
    trained = finetune_rows(load_checkpoint(str(source)), files, recipe, options)
    figures = measured(str(trained), tmp_path, tagged=(file,))
    assert figures["rows_entity_f1"] > 0.9
    model = load_checkpoint(str(trained)).model
    assert model.options["token_classification"].labels[:3] == ("O", "B-LOC", "I-LOC")


def tasks(folder: Path, *, articles: int = 40, **settings: Any) -> TasksRecipe:
    """A recipe of four tasks, whose files are written to the folder."""
    write_questions(folder / "questions.json", articles)
    write_labelled(folder / "who.jsonl", "one")
    write_labelled(folder / "several.jsonl", "several")
    write_tagged(folder / "tags.jsonl")
    rows = {"sequences": 16, "tokens": 40}
    window = {"tokens": 48, "stride": 8, "question_tokens": 14, "held_out": 0.2}
    table = [
        {"name": "qa", "kind": "qa", "questions": ["questions.json"], **window},
        {"name": "who", "kind": "classify", "learnt": ["who.jsonl"], **rows},
        {"name": "all", "kind": "classify", "learnt": ["several.jsonl"], **rows},
        {"name": "names", "kind": "tokens", "learnt": ["tags.jsonl"], **rows},
    ]
    fields = {"optimisation": FAST, "steps": 120, "dropout": 0.0, "task": table}
    return TasksRecipe.model_validate(fields | settings)


def test_one_bundle_serves_all_tasks(bert: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    options = RunOptions(tmp_path / "run", CPU, lines.append, Schedule(log=5, evaluate=500))
    recipe = tasks(tmp_path)
    trained = finetune_tasks(load_checkpoint(str(bert)), tmp_path, recipe, options, alone=True)
    rows = {row["task"]: row for row in json.loads((tmp_path / "run/tasks.json").read_text())}
    assert set(rows) == {"qa", "who", "all", "names"}
    assert rows["who"]["joint"] > 0.4
    assert all(row["gain"] == row["joint"] - row["alone"] for row in rows.values())
    assert any(line.startswith("who: accuracy") and "gain" in line for line in lines)

    # transformers reads the heads that its formats have.
    for kind, head, numbers in (
        (AutoModelForQuestionAnswering, "span", {"num_labels": 2}),
        (AutoModelForSequenceClassification, "sequence_classification", {}),
    ):
        network = kind.from_pretrained(trained, attn_implementation="eager", **numbers).eval()
        ids = ids_of(network, 9)
        assert same(ours(load_checkpoint(str(trained)), head, ids), theirs(network, head, ids))

    store = tmp_path / "store"
    bundle = export(str(trained), "tasks", Store(store))
    expected = ("qa", "text-classification", "token-classification")
    assert bundle.manifest.tasks == expected
    labels = bundle.manifest.heads["sequence_classification"]
    assert isinstance(labels, SequenceLabels)
    assert labels.names == ("who", "all")
    sets = [*labels.sets, *bundle.manifest.heads["token_classification"].sets]  # type: ignore[attr-defined]
    card = (trained / "README.md").read_text()
    for each in sets:
        reported = f"temperature {each.temperature:.3f}, expected calibration error"
        assert f"| {each.name} calibration | {reported}" in card
        assert any(line.startswith(f"{each.name}: {reported}") for line in lines)
    files = {
        "labelled": (tmp_path / "who.jsonl", tmp_path / "several.jsonl"),
        "tagged": (tmp_path / "tags.jsonl",),
    }
    figures = measured("bundle:tasks", store, **files)
    assert figures == pytest.approx(measured(str(trained), store, **files), abs=0.02)
    assert {"who_accuracy", "several_macro_f1", "tags_entity_f1"} <= figures.keys()
    with pytest.raises(TrainError, match=r"no label set 'x' .*\(who, all\)"):
        measured("bundle:tasks", store, labelled=files["labelled"], label_set="x")
    (tmp_path / "other").mkdir()
    other = shutil.copy(tmp_path / "several.jsonl", tmp_path / "other" / "who.jsonl")
    names = measured("bundle:tasks", store, labelled=(tmp_path / "who.jsonl", other))
    assert {f"{tmp_path.name}/who_accuracy", "other/who_macro_f1"} <= names.keys()
    assert names[f"{tmp_path.name}/who_accuracy"] == figures["who_accuracy"]
    assert names["other/who_macro_f1"] == figures["several_macro_f1"]
    with pytest.raises(TrainError, match=r"two files to measure have the name .*/other/who;"):
        measured("bundle:tasks", store, labelled=(other, other))
    _check_routes(store)


def _check_routes(store: Path) -> None:
    """A request chooses a label set by name; without one it gets the first."""
    text = f"{PEOPLE[0]} {ACTS[0]} {PLACES[0]}."
    with running_server(store, "--workers", "1") as server, httpx.Client() as client:

        def labels(parameters: dict[str, Any]) -> dict[str, float]:
            body = {"inputs": text, "parameters": parameters}
            (answer,) = client.post(f"{server.url}/classify", json=body).raise_for_status().json()
            return {each["label"]: each["score"] for each in answer}

        assert labels({}) == labels({"label_set": "who"})
        assert set(labels({})) == set(PEOPLE)
        assert sum(labels({}).values()) == pytest.approx(1)
        assert set(labels({"label_set": "all"})) == {*PEOPLE, *ACTS}
        body = {"inputs": text, "parameters": {"label_set": "x"}}
        refused = client.post(f"{server.url}/classify", json=body)
        assert refused.status_code == 422
        assert "'x' is not one of the label sets of tasks@1 (who, all)" in refused.text
        body = {"inputs": text, "parameters": {"label_set": "names"}}
        entities = client.post(f"{server.url}/token-classification", json=body)
        assert {each["entity_group"] for each in entities.raise_for_status().json()} <= {
            "PER",
            "LOC",
        }
        asked = {"inputs": {"question": f"Who {ACTS[0]}?", "context": text}}
        assert client.post(f"{server.url}/qa", json=asked).status_code == 200


def test_tasks_are_drawn_by_the_square_roots_of_their_sizes() -> None:
    drawn = draw_tasks([100, 10_000, 1], 1110, seed=1)
    assert np.bincount(drawn).tolist() == [100, 1000, 10]
    assert drawn != sorted(drawn)
    assert drawn == draw_tasks([100, 10_000, 1], 1110, seed=1)
    assert set(draw_tasks([1, 1_000_000], 4, seed=1)) == {0, 1}


class Stop(Exception):
    """The end of a run that a test kills."""


def test_a_run_that_stops_goes_on_to_the_same_weights(bert: Path, tmp_path: Path) -> None:
    recipe = tasks(tmp_path, steps=12)
    done = []
    for name in ("whole", "stopped"):
        options = RunOptions(tmp_path / name, CPU, quietly, Schedule(log=2, checkpoint=4))
        if name == "stopped":
            kills = RunOptions(tmp_path / name, CPU, quietly, Schedule(log=2, checkpoint=4))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("cloze.export.train.loop.Progress.advance", _kill_at(7))
                with pytest.raises(Stop):
                    finetune_tasks(load_checkpoint(str(bert)), tmp_path, recipe, kills)
        done.append(finetune_tasks(load_checkpoint(str(bert)), tmp_path, recipe, options))
    one, other = (load_checkpoint(str(folder)).model.state_dict() for folder in done)
    assert all(torch.equal(one[name], other[name]) for name in one)


def _kill_at(step: int) -> Any:
    steps = iter(range(step))

    def advance(*_: object) -> None:
        if next(steps, None) is None:
            raise Stop

    return advance


def test_a_run_with_patience_keeps_its_best_weights(bert: Path, tmp_path: Path) -> None:
    """The rate is so high that learning goes wrong after a while, or finds nothing better."""
    file = write_labelled(tmp_path / "rows.jsonl", "one")
    optimisation = Optimisation(learning_rate=0.02, precision="fp32", warmup=0.0, decay=0.01)
    recipe = LabelsRecipe(**{**LABELS, "optimisation": optimisation}, epochs=40, patience=2)
    options = RunOptions(tmp_path / "run", CPU, quietly, Schedule(log=1, evaluate=3))
    files = RowFiles([file], [file])
    trained = finetune_rows(load_checkpoint(str(bert)), files, recipe, options)
    entries = [entry for entry in read_log(trained.parent) if "held_out_accuracy" in entry]
    best = max(entry["held_out_accuracy"] for entry in entries)
    assert entries[-1]["step"] < 400
    figures = measured(str(trained), tmp_path, labelled=(file,))
    assert figures["rows_accuracy"] == pytest.approx(best)
    before = (trained / "model.safetensors").read_bytes()
    again = finetune_rows(load_checkpoint(str(bert)), files, recipe, options)
    assert (again / "model.safetensors").read_bytes() == before


def test_the_commands(bert: Path, tmp_path: Path) -> None:
    file, other = write_labelled(tmp_path / "a.jsonl", "one"), write_tagged(tmp_path / "b.jsonl")
    for command, option, rows in (
        ("finetune-classify", "--labelled", file),
        ("finetune-tokens", "--tagged", other),
    ):
        out = tmp_path / command
        recipe = tmp_path / f"{command}.toml"
        recipe.write_text("epochs = 1\ntokens = 40\n")
        arguments = [command, str(bert), option, str(rows), "--out", str(out)]
        ran = CliRunner().invoke(train, [*arguments, "--recipe", str(recipe)])
        assert ran.exit_code == 0, ran.output
        assert (out / "curves.png").is_file()
        arguments = ["evaluate", str(out / "checkpoint"), option, str(rows), "--json"]
        ran = CliRunner().invoke(train, arguments)
        assert "accuracy" in ran.output, ran.output


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_and_writes_both_classifiers(family: str, tmp_path: Path) -> None:
    save(family, "masked_lm", tmp_path / "source", max_position_embeddings=66)
    precise = Optimisation(precision="fp32")
    recipe = tasks(tmp_path, articles=8, steps=4, optimisation=precise)
    source = load_checkpoint(str(tmp_path / "source"))
    if any(head.needs_class for head in FAMILIES[family].heads.values()):
        with pytest.raises(TrainError, match="says only by its class that it has a span head"):
            finetune_tasks(source, tmp_path, recipe, run_options(tmp_path / "run"))
        return
    trained = finetune_tasks(source, tmp_path, recipe, run_options(tmp_path / "run"))
    heads = {head.name for head in load_checkpoint(str(trained)).heads}
    assert {"span", "sequence_classification", "token_classification"} <= heads


GOOD = {"text": "an owl", "label": "a"}
WRONG_ROWS = [
    ([GOOD, {"text": "x"}], 'line 2 needs either "label" or "labels"'),
    ([GOOD, {"text": "x", "label": True}], "line 2: .*got True"),
    ([GOOD, {"text": " ", "label": "a"}], "line 2: \"text\" must be a text, got ' '"),
    ([GOOD, {"text": "x", "label": 3}], "line 2: .* a text with a number, but .*line 1 is"),
    ([GOOD, {"text": "x", "text_pair": "y", "label": "b"}], "line 2: .* is a pair with one label"),
    ([GOOD, {"text": "x", "labels": ["a", 3]}], 'line 2: "labels" must be a list of strings'),
    ([], "is empty"),
]


@pytest.mark.parametrize(("rows", "message"), WRONG_ROWS)
def test_wrong_rows_are_named(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=f"rows.jsonl.*{message}") as caught:
        read_labelled([write_rows(tmp_path / "rows.jsonl", rows)])
    assert "\n" not in str(caught.value)


WRONG_TAGS = [
    ("an O\nowl I-PER\n", "line 2: the tag 'I-PER' follows 'O'; in IOB2 .* B-PER"),
    ("an B-LOC\nowl I-PER\n", "line 2: the tag 'I-PER' follows 'B-LOC'"),
    ("an O\nowl PER\n", "line 2: the tag 'PER' is none of"),
    ("an O\nowl\n", "line 2 is not a word and its tag: 'owl'"),
    ("\n\n", "there is no tagged sentence in it"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_TAGS)
def test_wrong_tags_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tags.conll"
    file.write_text(text)
    with pytest.raises(DataError, match=f"tags.conll.*{message}"):
        read_tagged([file])
    lines = tmp_path / "tags.jsonl"
    write_rows(lines, [{"tokens": ["a b"], "tags": ["O"]}])
    with pytest.raises(DataError, match=r"line 1: the token 'a b' has white space"):
        read_tagged([lines])
    write_rows(lines, [{"tokens": ["a", "b"], "tags": ["O"]}])
    with pytest.raises(DataError, match="line 1: 2 tokens have 1 tags"):
        read_tagged([lines])


ROWS = [{"text": f"an owl {n}", "label": "ab"[n % 2]} for n in range(20)]
WRONG_SETS: list[Any] = [
    (ROWS, [{"text": "x", "label": "new"}], {}, "dev.jsonl, line 1: no row .* the label 'new'"),
    (ROWS[::2], ROWS[:1], {}, "train.jsonl, line 1: every row has the label 'a'"),
    (
        [{"text": "x", "labels": ["a", "b", "c"]}],
        [{"text": "x", "labels": ["a"]}],
        {},
        "train.jsonl, line 1: 'b' is one of 3 labels, but there are only 1 rows",
    ),
    (
        [*ROWS, {"text": "an owl " * 40, "label": "a"}],
        ROWS,
        {},
        "train.jsonl, line 21: 'an owl .*tokens, the limit is 40",
    ),
    (ROWS, ROWS, {"class_weights": {"zz": 2.0}}, "class_weights: no row .* label 'zz'"),
    (ROWS, ROWS, {"tokens": 100}, "texts of 100 tokens exceed the checkpoint's 66 positions"),
]


@pytest.mark.parametrize(("learnt", "held_out", "settings", "message"), WRONG_SETS)
def test_nothing_is_trained_on_wrong_sets(
    bert: Path, tmp_path: Path, learnt: Any, held_out: Any, settings: Any, message: str
) -> None:
    files = RowFiles(
        [write_rows(tmp_path / "train.jsonl", learnt)],
        [write_rows(tmp_path / "dev.jsonl", held_out)],
    )
    recipe = LabelsRecipe(**(LABELS | settings))
    options = run_options(tmp_path / "run")
    with pytest.raises(DataError, match=message) as caught:
        finetune_rows(load_checkpoint(str(bert)), files, recipe, options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_a_label_that_is_not_measured_is_reported(bert: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    rows = [*ROWS, {"text": "x", "label": "seldom"}]
    files = RowFiles(
        [write_rows(tmp_path / "train.jsonl", rows)], [write_rows(tmp_path / "dev.jsonl", ROWS)]
    )
    options = RunOptions(tmp_path / "run", CPU, lines.append)
    recipe = LabelsRecipe(**LABELS, epochs=1)
    finetune_rows(load_checkpoint(str(bert)), files, recipe, options)
    expected = "train.jsonl, line 21: no held-out row has the label 'seldom'; it is not measured"
    assert any(line.endswith(expected) for line in lines)
