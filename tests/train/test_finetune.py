"""Fine-tuning for labels, tags, answers and several tasks: each command learns, resumes, refuses.

The oracles are transformers and peft, which read what a run leaves, and torchrun.
"""

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from peft import AutoPeftModelForSequenceClassification, PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
)

from cloze.export.families import FAMILIES
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.publish import export
from cloze.export.train.finetune import draw_tasks
from cloze.export.train.progress import read_log
from cloze.export.train.run_options import RunOptions, Schedule
from cloze.model_store import Store
from cloze.model_store.heads.sequence_classification import SequenceLabels
from cloze.train import train
from tests.support.serving import running_server
from tests.support.training import ACTS, PEOPLE, PLACES, write_questions
from tests.unit.export.families.test_against_transformers import (
    OFFSET,
    TOKENIZERS,
    WITHOUT_QUESTIONS,
    ids_of,
    ours,
    same,
    save,
    theirs,
    wordpiece,
)

pytestmark = pytest.mark.usefixtures("one_thread")

RATES = '[optimisation]\nlearning_rate = 5e-3\nhead_learning_rate = 1e-2\nprecision = "fp32"\n'
ROWS = "sequences = 16\ntokens = 40\ndropout = 0.0\n"
WINDOWS = "tokens = 48\nstride = 8\nquestion_tokens = 14\nheld_out = 0.2\n"


# ---- data


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _sentences(count: int, seed: int) -> Iterator[tuple[str, str, str]]:
    draw = random.Random(seed)
    for _ in range(count):
        yield draw.choice(PEOPLE), draw.choice(ACTS), draw.choice(PLACES)


def write_one(file: Path, count: int = 160) -> Path:
    """Who is in the text?"""
    rows = [
        {"text": f"{who} {act} {place}.", "label": who} for who, act, place in _sentences(count, 3)
    ]
    return write_rows(file, rows)


def write_several(file: Path) -> Path:
    rows = [
        {"text": f"{who} {act} {place}.", "labels": [who, act]}
        for who, act, place in _sentences(160, 7)
    ]
    return write_rows(file, rows)


def write_numbers(file: Path) -> Path:
    rows = [
        {"text": f"{who} {act} {place}.", "label": PEOPLE.index(who) / 5}
        for who, act, place in _sentences(160, 6)
    ]
    return write_rows(file, rows)


def write_pairs(file: Path) -> Path:
    """Who is in the second text?"""
    rows = [
        {"text": f"{PEOPLE[n % 6]} {act}", "text_pair": f"{who} {place}", "label": who}
        for n, (who, act, place) in enumerate(_sentences(160, 4))
    ]
    return write_rows(file, rows)


def write_tagged(file: Path) -> Path:
    """The person and the place are entities."""
    rows = []
    for who, act, place in _sentences(160, 9):
        tokens, tags = [], []
        for words, kind in ((who, "PER"), (act, ""), (place, "LOC")):
            for at, word in enumerate(words.split()):
                tokens.append(word)
                tags.append(f"{'I' if at else 'B'}-{kind}" if kind else "O")
        rows.append({"tokens": tokens, "tags": tags})
    return write_rows(file, rows)


def write_tasks(folder: Path) -> Path:
    """Four tasks, whose files are written beside the recipe."""
    write_questions(folder / "qa.json", 40)
    write_one(folder / "who.jsonl")
    write_several(folder / "all.jsonl")
    write_tagged(folder / "names.jsonl")
    tasks = [f'name = "qa"\nkind = "qa"\nquestions = ["qa.json"]\n{WINDOWS}']
    for name, kind in (("who", "classify"), ("all", "classify"), ("names", "tokens")):
        tasks.append(
            f'name = "{name}"\nkind = "{kind}"\nlearnt = ["{name}.jsonl"]\n'
            "sequences = 16\ntokens = 40\n"
        )
    recipe = folder / "tasks.toml"
    recipe.write_text(
        f"steps = 120\ndropout = 0.0\n{RATES}" + "".join(f"[[task]]\n{task}" for task in tasks)
    )
    return recipe


class Case(NamedTuple):
    """A command with data that a tiny model learns.

    Attributes:
        figure: the held-out figure that rises above ``least``.
        head: name of the head that is compared with transformers.
    """

    command: str
    option: str
    write: Callable[[Path], Path]
    recipe: str
    figure: str
    least: float
    head: str
    kind: Any


CLASSIFY = ("finetune-classify", "--labelled")
TEXTS = ("sequence_classification", AutoModelForSequenceClassification)
CASES = {
    "label": Case(*CLASSIFY, write_one, f"epochs = 16\n{ROWS}", "accuracy", 0.9, *TEXTS),
    "labels": Case(*CLASSIFY, write_several, f"epochs = 40\n{ROWS}", "micro_f1", 0.3, *TEXTS),
    "number": Case(*CLASSIFY, write_numbers, f"epochs = 16\n{ROWS}", "pearson", 0.8, *TEXTS),
    "pair": Case(*CLASSIFY, write_pairs, f"epochs = 30\n{ROWS}", "accuracy", 0.8, *TEXTS),
    "tags": Case(
        "finetune-tokens",
        "--tagged",
        write_tagged,
        f"epochs = 12\n{ROWS}",
        "entity_f1",
        0.9,
        "token_classification",
        AutoModelForTokenClassification,
    ),
    "answers": Case(
        "finetune-qa",
        "--questions",
        write_questions,
        f"epochs = 6\nsequences = 16\n{WINDOWS}",
        "f1",
        0.5,
        "span",
        AutoModelForQuestionAnswering,
    ),
}


def run(case: Case, source: Path, folder: Path, *options: str, recipe: str | None = None) -> Path:
    """Run a command; return the folder that it leaves."""
    folder.mkdir(exist_ok=True)
    data = folder / f"data.json{'' if case.head == 'span' else 'l'}"
    if not data.exists():
        case.write(data)
    (folder / "recipe.toml").write_text((recipe or case.recipe) + RATES)
    arguments = [case.command, source, case.option, data, "--recipe", folder / "recipe.toml"]
    ran = invoke(*arguments, "--out", folder / "run", "--device", "cpu", *options)
    assert ran.exit_code == 0, ran.output
    return folder / "run" / "checkpoint"


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(train, [str(each) for each in arguments], catch_exceptions=False)


def held_out(folder: Path) -> dict[str, float]:
    last = read_log(folder.parent)[-1]
    return {name[9:]: value for name, value in last.items() if name.startswith("held_out_")}


def save_source(family: str, folder: Path, **settings: Any) -> Path:
    """Save a random checkpoint with a tokenizer that names its special tokens."""
    network = save(family, "masked_lm", folder, max_position_embeddings=66, **settings)
    tokenizer = TOKENIZERS.get(family, wordpiece)()
    names = {token: f"{token}_token" for token in ("pad", "unk", "cls", "sep", "mask")}
    vocabulary = tokenizer.get_vocab()
    marks = ("<{}>", "[{}]")
    special = {
        name: form
        for token, name in names.items()
        for form in (marks[0].format(token), marks[1].format(token.upper()))
        if form in vocabulary
    }
    if family in OFFSET and "cls_token" not in special:
        special |= {"cls_token": "<s>", "sep_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    assert network.config.model_type == family
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source("bert", tmp_path_factory.mktemp("bert"))


# ---- every command learns, and transformers reads what it leaves


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("name", CASES)
def test_a_command_learns(name: str, family: str, tmp_path: Path) -> None:
    case = CASES[name]
    source = save_source(family, tmp_path / "source")
    trained = run(case, source, tmp_path)
    assert held_out(trained)[case.figure] > case.least
    assert (trained.parent / "curves.png").is_file()
    network, info = case.kind.from_pretrained(trained, output_loading_info=True)
    assert not info["missing_keys"]
    checkpoint, ids = load_checkpoint(str(trained)), ids_of(network, 9)
    assert same(ours(checkpoint, case.head, ids), theirs(network.eval(), case.head, ids))
    text = "the old king sang a song by the cold river"
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert tokenizer(text).input_ids == checkpoint.tokenizer.tokenizer.encode(text).ids
    again = ["evaluate", trained, case.option, next(tmp_path.glob("data.*")), "--json"]
    assert case.figure in invoke(*again).output


@pytest.mark.parametrize(
    ("name", "family"),
    [
        (name, family)
        for name in ("label", "tags", "answers")
        for family in FAMILIES
        if name != "answers" or family not in WITHOUT_QUESTIONS
    ],
)
def test_every_family_learns(name: str, family: str, tmp_path: Path) -> None:
    """Each family's own class of transformers is trained, and the export computes the same."""
    case = CASES[name]
    source = save_source(family, tmp_path / "source")
    trained = run(case, source, tmp_path, recipe=re.sub("epochs = .*", "epochs = 1", case.recipe))
    network = case.kind.from_pretrained(trained, attn_implementation="eager").eval()
    ids = ids_of(network, 9)
    assert same(
        ours(load_checkpoint(str(trained)), case.head, ids), theirs(network, case.head, ids)
    )


def test_a_classifier_of_the_mean_learns_what_is_served(tmp_path: Path) -> None:
    """A ModernBERT may classify the mean of all tokens, and not the first one."""
    source = save_source("modernbert", tmp_path / "source", classifier_pooling="mean")
    trained = run(CASES["label"], source, tmp_path)
    figure = held_out(trained)["accuracy"]
    assert figure > 0.9
    network = AutoModelForSequenceClassification.from_pretrained(trained).eval()
    assert network.config.classifier_pooling == "mean"
    export(str(trained), "mean", Store(tmp_path / "store"))
    text = f"{PEOPLE[0]} {ACTS[1]} {PLACES[2]}."
    inputs = AutoTokenizer.from_pretrained(trained)(text, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        expected = network(**inputs).logits.softmax(-1)[0]
    answers = _asked(tmp_path / "store", "/classify", {"inputs": text})[0]
    served = {each["label"]: each["score"] for each in answers}
    labels = network.config.id2label
    for number, score in enumerate(expected.tolist()):
        assert served[labels[number]] == pytest.approx(score, abs=1e-4)


def _asked(store: Path, path: str, body: dict[str, Any]) -> Any:
    with running_server(store, "--workers", "1") as server:
        return httpx.post(f"{server.url}{path}", json=body).raise_for_status().json()


def test_several_tasks_share_an_encoder_and_a_bundle(bert: Path, tmp_path: Path) -> None:
    recipe = write_tasks(tmp_path)
    ran = invoke(
        "finetune-tasks", recipe, "--from", bert, "--data", tmp_path, "--out", tmp_path / "run"
    )
    assert ran.exit_code == 0, ran.output
    trained = tmp_path / "run/checkpoint"
    figures = held_out(trained)
    assert figures["who_accuracy"] > 0.4
    assert figures["names_entity_f1"] > 0.4
    assert {"qa_f1", "all_macro_f1", "mean"} <= figures.keys()
    for kind, head in (
        (AutoModelForQuestionAnswering, "span"),
        (AutoModelForSequenceClassification, "sequence_classification"),
    ):
        numbers = {"num_labels": 2} if head == "span" else {}
        network = kind.from_pretrained(trained, attn_implementation="eager", **numbers).eval()
        ids = ids_of(network, 9)
        assert same(ours(load_checkpoint(str(trained)), head, ids), theirs(network, head, ids))
    manifest = export(str(trained), "tasks", Store(tmp_path / "store")).manifest
    assert manifest.tasks == ("qa", "text-classification", "token-classification")
    labels = manifest.heads["sequence_classification"]
    assert isinstance(labels, SequenceLabels)
    assert labels.names == ("who", "all")
    card = (trained / "README.md").read_text()
    for each in labels.sets:
        reported = f"temperature {each.temperature:.3f}, expected calibration error"
        assert f"| {each.name} calibration | {reported}" in card
    files = [("--labelled", "who.jsonl"), ("--labelled", "all.jsonl"), ("--tagged", "names.jsonl")]
    given = [part for option, name in files for part in (option, tmp_path / name)]
    of_bundle, of_folder = (
        json.loads(
            invoke("evaluate", name, *given, "--json", "--model-store", tmp_path / "store").output
        )
        for name in ("bundle:tasks", trained)
    )
    assert {"who_accuracy", "all_macro_f1", "names_entity_f1"} <= {*map(str, _figures(of_bundle))}
    assert _figures(of_bundle) == pytest.approx(_figures(of_folder), abs=0.02)
    _check_label_sets(tmp_path / "store")


def _check_label_sets(store: Path) -> None:
    """A request chooses a label set by name; without one it gets the first."""
    with running_server(store, "--workers", "1") as server:

        def asked(**parameters: str) -> Any:
            body = {"inputs": f"{PEOPLE[0]} {ACTS[0]}.", "parameters": parameters}
            return httpx.post(f"{server.url}/classify", json=body)

        labels = [
            {each["label"] for each in asked(**given).json()[0]}
            for given in ({}, {"label_set": "who"}, {"label_set": "all"})
        ]
        assert labels == [set(PEOPLE), set(PEOPLE), {*PEOPLE, *ACTS}]
        refused = asked(label_set="x")
        assert refused.status_code == 422
        assert "'x' is not one of the label sets of tasks@1 (who, all)" in refused.text


def _figures(rows: Any) -> dict[str, float]:
    return rows if isinstance(rows, dict) else {row["figure"]: row["value"] for row in rows}


def test_heads_that_have_a_layer_in_common_are_trained_alone(tmp_path: Path) -> None:
    source = save_source("modernbert", tmp_path / "source")
    recipe = write_tasks(tmp_path)
    ran = invoke(
        "finetune-tasks", recipe, "--from", source, "--data", tmp_path, "--out", tmp_path / "run"
    )
    assert "have the same name in a folder (head.dense.weight); train each task alone" in ran.output


def test_tasks_are_drawn_by_the_square_roots_of_their_sizes() -> None:
    drawn = draw_tasks([100, 10_000, 1], 1110, seed=1)
    assert np.bincount(drawn).tolist() == [100, 1000, 10]
    assert drawn != sorted(drawn)
    assert drawn == draw_tasks([100, 10_000, 1], 1110, seed=1)
    assert set(draw_tasks([1, 1_000_000], 4, seed=1)) == {0, 1}


# ---- low-rank matrices


LORA = (
    '[lora]\nlearning_rate = 2e-2\ntargets = ["query", "key", "value", "attention-output", '
    '"feed-forward-in", "feed-forward-out"]\n'
)


@pytest.mark.parametrize("name", ["label", "tags", "answers"])
def test_peft_reads_an_adapter_and_an_export_merges_it(
    name: str, bert: Path, tmp_path: Path
) -> None:
    case = CASES[name]
    folder = run(case, bert, tmp_path, "--lora", "4", recipe=case.recipe + LORA)
    assert held_out(folder)[case.figure] > 0.6 * case.least
    assert not (folder / "model.safetensors").exists()
    described = json.loads((folder / "adapter_config.json").read_text())
    assert described["r"] == 4
    assert described["base_model_name_or_path"] == str(bert.resolve())
    settings = {"num_labels": 2} if name == "answers" else _labels(folder)
    base = case.kind.from_pretrained(bert, attn_implementation="eager", **settings)
    network = PeftModel.from_pretrained(base, folder).eval()
    ids = ids_of(network, 9)
    assert same(ours(load_checkpoint(str(folder)), case.head, ids), theirs(network, case.head, ids))
    tasks = export(str(folder), "merged", Store(tmp_path / "store")).manifest.tasks
    assert len(tasks) == 1


def _labels(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {"id2label": {int(number): name for number, name in config["id2label"].items()}}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_layers_of_a_recipe(family: str, tmp_path: Path) -> None:
    source = save_source(family, tmp_path / "source")
    recipe = CASES["label"].recipe.replace("epochs = 16", "epochs = 1") + LORA
    folder = run(CASES["label"], source, tmp_path, "--lora", "2", recipe=recipe)
    network = AutoPeftModelForSequenceClassification.from_pretrained(
        folder, **_labels(folder)
    ).eval()
    learnt = {
        name.partition(".lora_")[0] for name in load_file(folder / "adapter_model.safetensors")
    }
    linears = {
        name
        for name, module in network.named_modules()
        if hasattr(module, "lora_A") and "embeddings" not in name
    }
    assert len([name for name in learnt if name in linears]) == len(linears) > 3
    ids = ids_of(network, 9)
    head = "sequence_classification"
    assert same(ours(load_checkpoint(str(folder)), head, ids), theirs(network, head, ids))


# ---- every command goes on where it stopped


class Stop(Exception):
    """The end of a run that a test kills."""


def _kill_at(step: int) -> Any:
    steps = iter(range(step))

    def advance(*_: object) -> None:
        if next(steps, None) is None:
            raise Stop

    return advance


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, ()) for name in ("label", "tags", "answers", "tasks")),
        *((name, ("--lora", "2")) for name in ("label", "tags", "answers")),
    ],
)
def test_a_run_that_stops_goes_on_to_the_same_weights(
    name: str,
    options: tuple[str, ...],
    bert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    often = partial(RunOptions, schedule=Schedule(log=2, evaluate=3, checkpoint=4))
    monkeypatch.setattr("cloze.export.train.run_options.RunOptions", often)

    def trained(folder: Path) -> Path:
        if name == "tasks":
            folder.mkdir(exist_ok=True)
            recipe = write_tasks(folder)
            recipe.write_text(recipe.read_text().replace("steps = 120", "steps = 12"))
            arguments = ["--from", bert, "--data", folder, "--out", folder / "run"]
            invoke("finetune-tasks", recipe, *arguments)
            return folder / "run/checkpoint"
        recipe = re.sub("epochs = .*", "epochs = 1", CASES[name].recipe)
        recipe = recipe.replace("dropout = 0.0", "dropout = 0.1")
        return run(CASES[name], bert, folder, *options, recipe=recipe)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cloze.export.train.loop.Progress.advance", _kill_at(7))
        with pytest.raises(Stop):
            trained(tmp_path / "stopped")
    one, other = (
        load_file(next(trained(tmp_path / each).glob("*model.safetensors")))
        for each in ("whole", "stopped")
    )
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_run_with_patience_keeps_its_best_weights(bert: Path, tmp_path: Path) -> None:
    """The rate is so high that learning goes wrong after a while, or finds nothing better."""
    recipe = (
        f"epochs = 60\npatience = 2\n{ROWS}[optimisation]\nlearning_rate = 0.02\nwarmup = 0.0\n"
    )
    trained = run_with(recipe + 'precision = "fp32"\ndecay = 0.01\n', bert, tmp_path)
    entries = [each for each in read_log(trained.parent) if "held_out_accuracy" in each]
    best = max(entry["held_out_accuracy"] for entry in entries)
    assert entries[-1]["step"] < 540
    data = next(tmp_path.glob("data.*"))
    card = (trained / "README.md").read_text()
    assert f"| held out accuracy | {best:.4f} |" in card
    before = (trained / "model.safetensors").read_bytes()
    run_with(recipe + 'precision = "fp32"\ndecay = 0.01\n', bert, tmp_path)
    assert (trained / "model.safetensors").read_bytes() == before
    assert data.exists()


def run_with(recipe: str, source: Path, folder: Path) -> Path:
    """Run a classification whose recipe has rates of its own."""
    data = folder / "data.jsonl"
    if not data.exists():
        write_one(data)
    (folder / "recipe.toml").write_text(recipe)
    ran = invoke(
        "finetune-classify", source, "--labelled", data, "--recipe", folder / "recipe.toml",
        "--out", folder / "run", "--device", "cpu",
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    return folder / "run/checkpoint"


@pytest.mark.slow
def test_two_processes_learn_the_weights_of_one_with_twice_the_batches(
    bert: Path, tmp_path: Path
) -> None:
    data = write_one(tmp_path / "rows.jsonl")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "-m",
        "cloze",
    ]
    for name, start, accumulation in (
        ("one", [sys.executable, "-m", "cloze"], 2),
        ("two", torchrun, 1),
    ):
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text(
            f"epochs = 2\ntokens = 40\ndropout = 0.1\n{RATES}accumulation = {accumulation}\n"
        )
        arguments = ["train", "finetune-classify", bert, "--labelled", data, "--recipe", recipe]
        arguments += ["--out", tmp_path / name, "--threads", "1", "--device", "cpu"]
        ran = subprocess.run([*start, *map(str, arguments)], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("curves in") == 1
    one, two = (
        load_file(tmp_path / name / "checkpoint/model.safetensors") for name in ("one", "two")
    )
    assert all(torch.equal(one[key], two[key]) for key in one)
    logs = [read_log(tmp_path / name) for name in ("one", "two")]
    assert [each["step"] for each in logs[0]] == [each["step"] for each in logs[1]]
    assert logs[0][-1]["tokens_seen"] == logs[1][-1]["tokens_seen"]
    assert logs[1][-1]["loss"] == pytest.approx(logs[0][-1]["loss"], abs=1e-5)


# ---- what a recipe says


def test_a_balanced_weight_raises_a_rare_label(bert: Path, tmp_path: Path) -> None:
    """A constant text: the model learns how often each label occurs, weighted."""
    rows = [{"text": "the owl", "label": "rare" if n % 10 == 0 else "common"} for n in range(160)]
    shares = []
    for weights in ("none", "balanced"):
        folder = tmp_path / weights
        folder.mkdir()
        data = write_rows(folder / "data.jsonl", rows)
        recipe = f'epochs = 6\n{ROWS}class_weights = "{weights}"\n'
        given = ("--held-out-labelled", str(data))
        trained = run(CASES["label"], bert, folder, *given, recipe=recipe)
        network = AutoModelForSequenceClassification.from_pretrained(trained).eval()
        ids = AutoTokenizer.from_pretrained(trained)("the owl", return_tensors="pt")
        with torch.no_grad():
            shares.append(float(network(**ids).logits.softmax(-1)[0, 1]))
    assert shares[0] < 0.25
    assert 0.35 < shares[1] < 0.65


def test_the_written_weights_have_the_temperature_of_the_held_out_rows(
    bert: Path, tmp_path: Path
) -> None:
    """A second calibration finds nothing to change."""
    from cloze.export.measure.metrics import calibrate

    rows = [
        {"text": f"{who} {act}", "label": who if n % 4 else "an owl"}
        for n, (who, act, _) in enumerate(_sentences(300, 5))
    ]
    data = write_rows(tmp_path / "data.jsonl", rows)
    trained = run(CASES["label"], bert, tmp_path, "--held-out-labelled", str(data))
    section = json.loads((trained / "config.json").read_text())["cloze_heads"]
    temperature = section["sequence_classification"]["temperature"]
    assert 0.11 < temperature < 9
    network = AutoModelForSequenceClassification.from_pretrained(trained).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained)
    with torch.no_grad():
        logits = network(
            **tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
        )
    gold = [[row["label"] == name for name in network.config.label2id] for row in rows]
    again = calibrate(logits.logits.numpy(), np.array(gold), independent=False)
    assert again.temperature == pytest.approx(1, rel=1e-3)


# ---- every command refuses what it cannot use, before it trains


GOOD = [{"text": f"an owl {n}", "label": "ab"[n % 2]} for n in range(20)]
LONG = {"text": "an owl " * 40, "label": "a"}
BAD_ROWS: list[tuple[Any, Any, str, str]] = [
    ([*GOOD, {"text": "x"}], None, "", 'data.jsonl, line 21: needs either "label" or "labels"'),
    (
        [*GOOD, {"text": "x", "label": 3}],
        None,
        "",
        "line 21: .* a text with a number, but .*line 1 is",
    ),
    ([], None, "", "data.jsonl is empty"),
    (GOOD, [{"text": "x", "label": "new"}], "", "dev.jsonl, line 1: no row .* the label 'new'"),
    (GOOD[::2], GOOD[:1], "", "data.jsonl, line 1: every row has the label 'a'"),
    ([*GOOD, LONG], GOOD, "", "data.jsonl, line 21: 'an owl .*tokens, the limit is 40"),
    (GOOD, GOOD, "class_weights = {zz = 2.0}\n", "class_weights: no row .* label 'zz'"),
    (GOOD, GOOD, "tokens = 100\n", "sequences of 100 tokens exceed the checkpoint's 66 positions"),
    (GOOD, GOOD, 'class_weights = "some"\n', "class_weights"),
    (GOOD, GOOD, "sise = 1\n", "recipe.toml: unknown key sise"),
]


@pytest.mark.parametrize(("rows", "dev", "recipe", "message"), BAD_ROWS)
def test_bad_rows(
    bert: Path, tmp_path: Path, rows: Any, dev: Any, recipe: str, message: str
) -> None:
    given = ["--labelled", write_rows(tmp_path / "data.jsonl", rows)]
    if dev is not None:
        given += ["--held-out-labelled", write_rows(tmp_path / "dev.jsonl", dev)]
    recipe += "" if "tokens" in recipe else "tokens = 40\n"
    _refused(tmp_path, ["finetune-classify", bert, *given], recipe, message)


def _refused(folder: Path, arguments: list[Any], recipe: str, message: str) -> None:
    """Check that a command ends with one line, and begins no run."""
    (folder / "recipe.toml").write_text(recipe)
    run = folder / "run"
    ran = invoke(*arguments, "--recipe", folder / "recipe.toml", "--out", run, "--device", "cpu")
    assert ran.exit_code == 1
    assert re.search(message, ran.output.splitlines()[-1]), ran.output
    assert not (run / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("an O\nowl I-PER\n", "line 2: the tag 'I-PER' follows 'O'; in IOB2 .* B-PER"),
        ("an O\nowl PER\n", "line 2: the tag 'PER' is none of"),
        ("an O\nowl\n", "line 2 is not a word and its tag: 'owl'"),
        ("\n\n", "there is no tagged sentence in it"),
    ],
)
def test_bad_tags(bert: Path, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tags.conll"
    file.write_text(text)
    _refused(tmp_path, ["finetune-tokens", bert, "--tagged", file], "", f"tags.conll.*{message}")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("tokens = 100\n", "sequences of 100 tokens exceed the checkpoint's 66 positions"),
        ("tokens = 48\nstride = 30\nquestion_tokens = 20\n", "windows of 48 tokens leave no room"),
        (
            "held_out = 0.9999\ntokens = 48\nstride = 8\nquestion_tokens = 14\n",
            "every question is of a held-out",
        ),
    ],
)
def test_bad_windows(bert: Path, tmp_path: Path, recipe: str, message: str) -> None:
    file = write_questions(tmp_path / "questions.json", 4)
    recipe = recipe if "stride" in recipe else f"{recipe}stride = 8\nquestion_tokens = 14\n"
    _refused(tmp_path, ["finetune-qa", bert, "--questions", file], recipe, message)


BAD_FOLDERS: list[tuple[Callable[[Path], object], str]] = [
    (lambda source: (source / "config.json").unlink(), "holds no config.json"),
    (lambda source: (source / "config.json").write_text("{"), "config.json"),
    (lambda source: (source / "model.safetensors").unlink(), "holds no weights"),
    (lambda source: (source / "model.safetensors").write_bytes(b"x" * 99), "cannot be loaded"),
    (
        lambda source: (source / "model.safetensors").rename(source / "pytorch_model.bin"),
        "pytorch_model.bin is never loaded, since it can run code",
    ),
    (lambda source: (source / "tokenizer.json").write_text("{"), "cannot be loaded"),
    (lambda source: _change(source, hidden_size=27), "is of another size than config.json says"),
    (lambda source: _change(source, num_hidden_layers=3), "encoder.layer.2.* is missing"),
    (lambda source: _change(source, model_type="no-such"), "cannot be loaded"),
    (lambda source: _poison(source), "holds NaN or infinity"),
    (lambda source: _lose_shard(source), "cannot be loaded: .*model-00002-of-0000"),
]


def _change(source: Path, **settings: Any) -> None:
    config = json.loads((source / "config.json").read_text()) | settings
    (source / "config.json").write_text(json.dumps(config))


def _lose_shard(source: Path) -> None:
    network = BertForMaskedLM.from_pretrained(source)
    (source / "model.safetensors").unlink()
    network.save_pretrained(source, max_shard_size="20KB")
    next(source.glob("model-00002-of-*")).unlink()


def _poison(source: Path) -> None:
    from safetensors.torch import save_file

    tensors = load_file(source / "model.safetensors")
    tensors["bert.embeddings.LayerNorm.weight"][0] = torch.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("damage", "message"), BAD_FOLDERS)
def test_bad_folders(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    source = save_source("bert", tmp_path / "source")
    damage(source)
    file = write_rows(tmp_path / "data.jsonl", GOOD)
    _refused(tmp_path, ["finetune-classify", source, "--labelled", file], "tokens = 40\n", message)


def test_several_tasks_take_no_adapter(bert: Path, tmp_path: Path) -> None:
    recipe = write_tasks(tmp_path)
    arguments = ["--from", bert, "--data", tmp_path, "--out", tmp_path / "run"]
    assert "No such option" in invoke("finetune-tasks", recipe, *arguments, "--lora", "8").output
    recipe.write_text(recipe.read_text() + "[lora]\nrank = 2\n")
    assert "unknown key lora" in invoke("finetune-tasks", recipe, *arguments).output
