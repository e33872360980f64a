"""Fine-tuning for labels, tags, answers and several tasks: each command learns, resumes, refuses.

The oracles are transformers and peft, which read what a run leaves, and torchrun.
"""

import json
import random
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from peft import AutoPeftModelForSequenceClassification, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cloze.export.families import FAMILIES
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.measure.metrics import calibrate
from cloze.export.publish import export
from cloze.export.train.finetune import draw_tasks
from cloze.export.train.progress import read_log
from cloze.export.train.run_options import RunOptions, Schedule
from cloze.model_store import Store
from tests.support import fine_tuning
from tests.support.command import call
from tests.support.family_checkpoints import ids_of, ours, same, theirs
from tests.support.fine_tuning import LORA, check_refused, held_out, invoke, save_source
from tests.support.training import ACTS, PEOPLE, PLACES, write_questions

pytestmark = pytest.mark.usefixtures("one_thread")

RATES = '[optimisation]\nlearning_rate = 5e-3\nhead_learning_rate = 1e-2\nprecision = "fp32"\n'
ROWS = "sequences = 16\ntokens = 40\ndropout = 0.0\n"
WINDOWS = "tokens = 48\nstride = 8\nquestion_tokens = 14\nheld_out = 0.2\n"


def tagged(*parts: str) -> dict[str, list[str]]:
    """The person and the place are entities."""
    words = [
        (word, f"{'I' if at else 'B'}-{kind}" if kind else "O")
        for part, kind in zip(parts, ("PER", "", "LOC"), strict=True)
        for at, word in enumerate(part.split())
    ]
    return {"tokens": [word for word, _ in words], "tags": [tag for _, tag in words]}


MAKE: dict[str, Callable[[int, str, str, str], dict[str, Any]]] = {
    "label": lambda _, who, act, place: {"text": f"{who} {act} {place}.", "label": who},
    "labels": lambda _, who, act, place: {"text": f"{who} {act} {place}.", "labels": [who, act]},
    "number": lambda _, *three: {"text": " ".join(three), "label": PEOPLE.index(three[0]) / 5},
    "pair": lambda n, who, act, place: {
        "text": f"{PEOPLE[n % 6]} {act}", "text_pair": f"{who} {place}", "label": who
    },
    "tags": lambda _, *three: tagged(*three),
}  # fmt: skip


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write(name: str, file: Path) -> Path:
    """Write what a case of `CASES` learns from."""
    if name == "answers":
        return write_questions(file)
    draw = random.Random(4 if name == "pair" else 3)
    three = [[draw.choice(each) for each in (PEOPLE, ACTS, PLACES)] for _ in range(160)]
    return write_rows(file, [MAKE[name](n, *each) for n, each in enumerate(three)])


def write_tasks(folder: Path) -> Path:
    """Four tasks, whose files are written beside the recipe."""
    write_questions(folder / "qa.json", 40)
    tasks = [f'name = "qa"\nkind = "qa"\nquestions = ["qa.json"]\n{WINDOWS}']
    for name, case in {"who": "label", "all": "labels", "names": "tags"}.items():
        write(case, folder / f"{name}.jsonl")
        kind = CASES[case].command.removeprefix("finetune-")
        given = f'name = "{name}"\nkind = "{kind}"\nlearnt = ["{name}.jsonl"]\n'
        tasks.append(f"{given}sequences = 16\ntokens = 40\n")
    recipe = folder / "tasks.toml"
    parts = "".join(f"[[task]]\n{task}" for task in tasks)
    recipe.write_text(f"steps = 120\ndropout = 0.0\n{RATES}{parts}")
    return recipe


class Case(NamedTuple):
    """A command with data that a tiny model learns: its held-out ``figure`` rises above ``least``."""

    command: str
    option: str
    recipe: str
    figure: str
    least: float
    head: str
    kind: Any


CLASSIFY = ("finetune-classify", "--labelled")
TEXTS = ("sequence_classification", AutoModelForSequenceClassification)
TAGS = ("token_classification", transformers.AutoModelForTokenClassification)
ANSWERS = f"epochs = 6\nsequences = 16\n{WINDOWS}"
SPANS = ("span", transformers.AutoModelForQuestionAnswering)
CASES = {
    "label": Case(*CLASSIFY, f"epochs = 16\n{ROWS}", "accuracy", 0.9, *TEXTS),
    "labels": Case(*CLASSIFY, f"epochs = 40\n{ROWS}", "micro_f1", 0.3, *TEXTS),
    "number": Case(*CLASSIFY, f"epochs = 16\n{ROWS}", "pearson", 0.8, *TEXTS),
    "pair": Case(*CLASSIFY, f"epochs = 30\n{ROWS}", "accuracy", 0.8, *TEXTS),
    "tags": Case("finetune-tokens", "--tagged", f"epochs = 12\n{ROWS}", "entity_f1", 0.9, *TAGS),
    "answers": Case("finetune-qa", "--questions", ANSWERS, "f1", 0.5, *SPANS),
}
COMMANDS = {"label": "SEQ_CLS", "tags": "TOKEN_CLS", "answers": "QUESTION_ANS"}
"""A case of each command, and peft's name of its task."""


def one_epoch(name: str) -> str:
    return re.sub("epochs = .*", "epochs = 1", CASES[name].recipe)


def run(name: str, source: Path, folder: Path, *options: str, recipe: str | None = None) -> Path:
    """Run the command of a case; return the folder that it leaves.

    The figure of held-out rows is the last thing that the command says.
    """
    case = CASES[name]
    folder.mkdir(exist_ok=True)
    data = folder / f"data.json{'' if name == 'answers' else 'l'}"
    if not data.exists():
        write(name, data)
    recipe = recipe or case.recipe
    (folder / "recipe.toml").write_text(recipe if "[optim" in recipe else recipe + RATES)
    arguments = [case.command, source, case.option, data, "--recipe", folder / "recipe.toml"]
    ran = invoke(*arguments, "--out", folder / "run", "--device", "cpu", *options)
    assert ran.exit_code == 0, ran.output
    said = rf"on \d+ held-out rows, .* {case.figure.replace('_', ' ')} \d\.\d\d\d"
    assert re.match(said, ran.stderr.splitlines()[-1])
    return folder / "run" / "checkpoint"


def run_tasks(source: Path, folder: Path) -> Any:
    """Run the recipe of `write_tasks`, which lies in the folder."""
    given = ["--from", source, "--data", folder, "--out", folder / "run"]
    return invoke("finetune-tasks", folder / "tasks.toml", *given)


def check_equal(folder: Path, head: str, network: Any) -> None:
    """Check that the export of a folder computes what transformers does."""
    ids = ids_of(network, 9)
    assert same(ours(load_checkpoint(str(folder)), head, ids), theirs(network.eval(), head, ids))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source("bert", tmp_path_factory.mktemp("bert"))


@pytest.mark.parametrize("family", fine_tuning.slow_but(["bert", "roberta"], "bert"))
@pytest.mark.parametrize("name", fine_tuning.slow_but(CASES, *COMMANDS))
def test_a_command_learns(name: str, family: str, tmp_path: Path) -> None:
    case = CASES[name]
    source = save_source(family, tmp_path / "source")
    trained = run(name, source, tmp_path)
    assert held_out(trained)[case.figure] > case.least
    assert (trained.parent / "curves.png").is_file()
    network, info = case.kind.from_pretrained(trained, output_loading_info=True)
    assert not info["missing_keys"]
    check_equal(trained, case.head, network)
    text = "the old king sang a song by the cold river"
    tokenizer = load_checkpoint(str(trained)).tokenizer.tokenizer
    assert AutoTokenizer.from_pretrained(trained)(text).input_ids == tokenizer.encode(text).ids
    again = ["evaluate", trained, case.option, next(tmp_path.glob("data.*")), "--json"]
    assert case.figure in invoke(*again).output


def test_several_tasks_share_an_encoder_and_a_bundle(bert: Path, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    ran = run_tasks(bert, tmp_path)
    assert ran.exit_code == 0, ran.output
    trained = tmp_path / "run/checkpoint"
    figures = held_out(trained)
    assert figures["who_accuracy"] > 0.4
    assert figures["names_entity_f1"] > 0.4
    assert {"qa_f1", "all_macro_f1", "mean"} <= figures.keys()
    for name, numbers in (("answers", {"num_labels": 2}), ("label", {})):
        kind = CASES[name].kind
        network = kind.from_pretrained(trained, attn_implementation="eager", **numbers)
        check_equal(trained, CASES[name].head, network)
    manifest = export(str(trained), "tasks", Store(tmp_path / "store")).manifest
    assert manifest.tasks == ("qa", "text-classification", "token-classification")
    labels = manifest.heads["sequence_classification"]
    assert labels.names == ("who", "all")
    assert [{*each.labels} for each in labels.sets] == [{*PEOPLE}, {*PEOPLE, *ACTS}]
    card = (trained / "README.md").read_text()
    for each in labels.sets:
        reported = f"temperature {each.temperature:.3f}, expected calibration error"
        assert f"| {each.name} calibration | {reported}" in card
    files = [("--labelled", "who.jsonl"), ("--labelled", "all.jsonl"), ("--tagged", "names.jsonl")]
    given = [part for option, name in files for part in (option, tmp_path / name)]
    given += ["--json", "--model-store", tmp_path / "store"]
    of_bundle, of_folder = (
        json.loads(invoke("evaluate", name, *given).output) for name in ("bundle:tasks", trained)
    )
    assert {"who_accuracy", "all_macro_f1", "names_entity_f1"} <= of_bundle.keys()
    assert of_bundle == pytest.approx(of_folder, abs=0.02)


def test_heads_that_have_a_layer_in_common_are_trained_alone(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    ran = run_tasks(save_source("modernbert", tmp_path / "source"), tmp_path)
    assert "have the same name in a folder (head.dense.weight); train each task alone" in ran.output


def test_tasks_are_drawn_by_the_square_roots_of_their_sizes() -> None:
    drawn = draw_tasks([100, 10_000, 1], 1110, seed=1)
    assert np.bincount(drawn).tolist() == [100, 1000, 10]
    assert drawn != sorted(drawn)
    assert drawn == draw_tasks([100, 10_000, 1], 1110, seed=1)
    assert set(draw_tasks([1, 1_000_000], 4, seed=1)) == {0, 1}


@pytest.mark.parametrize("name", fine_tuning.slow_but(COMMANDS, "label"))
def test_peft_reads_an_adapter_and_exports_merge_it(
    name: str, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    monkeypatch.chdir(bert.parent)
    folder = run(name, Path(bert.name), tmp_path, "--lora", "4", recipe=case.recipe + LORA)
    assert held_out(folder)[case.figure] > 0.6 * case.least
    assert not (folder / "model.safetensors").exists()
    described = json.loads((folder / "adapter_config.json").read_text())
    assert (described["r"], described["task_type"]) == (4, COMMANDS[name])
    assert described["base_model_name_or_path"] == str(bert.resolve())
    settings = {"num_labels": 2} if name == "answers" else labels_of(folder)
    base = case.kind.from_pretrained(bert, attn_implementation="eager", **settings)
    check_equal(folder, case.head, PeftModel.from_pretrained(base, folder))
    tasks = export(str(folder), "merged", Store(tmp_path / "store")).manifest.tasks
    assert len(tasks) == 1


def labels_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {"id2label": {int(number): name for number, name in config["id2label"].items()}}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_layers_of_a_recipe(family: str, tmp_path: Path) -> None:
    source = save_source(family, tmp_path / "source")
    folder = run("label", source, tmp_path, "--lora", "2", recipe=one_epoch("label") + LORA)
    network = AutoPeftModelForSequenceClassification.from_pretrained(folder, **labels_of(folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    learnt = {name.partition(".lora_")[0] for name in tensors}
    adapted = [name for name, module in network.named_modules() if hasattr(module, "lora_A")]
    linears = {name for name in adapted if "embeddings" not in name}
    assert len(learnt & linears) == len(linears) > 3
    check_equal(folder, "sequence_classification", network)


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, ()) for name in (*COMMANDS, "tasks")] + [(name, ("--lora", "2")) for name in COMMANDS],
)
def test_a_run_that_stops_goes_on_to_the_same_weights(
    name: str, options: tuple[str, ...], bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = partial(RunOptions, schedule=Schedule(log=2, evaluate=3, checkpoint=4))
    monkeypatch.setattr("cloze.export.train.run_options.RunOptions", often)

    def trained(folder: Path) -> Path:
        if name == "tasks":
            folder.mkdir(exist_ok=True)
            recipe = write_tasks(folder)
            recipe.write_text(recipe.read_text().replace("steps = 120", "steps = 12"))
            run_tasks(bert, folder)
            return folder / "run/checkpoint"
        recipe = one_epoch(name).replace("dropout = 0.0", "dropout = 0.1")
        return run(name, bert, folder, *options, recipe=recipe)

    with fine_tuning.stopped_after(7):
        trained(tmp_path / "stopped")
    folders = [trained(tmp_path / each) for each in ("whole", "stopped")]
    one, other = (load_file(next(each.glob("*model.safetensors"))) for each in folders)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_run_with_patience_keeps_its_best_weights(bert: Path, tmp_path: Path) -> None:
    """The rate is so high that learning goes wrong after a while, or finds nothing better."""
    rates = 'learning_rate = 0.02\nwarmup = 0.0\nprecision = "fp32"\ndecay = 0.01\n'
    recipe = f"epochs = 60\npatience = 2\n{ROWS}[optimisation]\n{rates}"
    trained = run("label", bert, tmp_path, recipe=recipe)
    entries = [each for each in read_log(trained.parent) if "held_out_accuracy" in each]
    best = max(entry["held_out_accuracy"] for entry in entries)
    assert entries[-1]["step"] < 540
    assert f"| held out accuracy | {best:.4f} |" in (trained / "README.md").read_text()
    before = (trained / "model.safetensors").read_bytes()
    run("label", bert, tmp_path, recipe=recipe)
    assert (trained / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_two_processes_learn_as_one_with_twice_the_batches(bert: Path, tmp_path: Path) -> None:
    data = write("label", tmp_path / "rows.jsonl")
    python, torchrun = [sys.executable, "-m"], ["torch.distributed.run", "--nproc_per_node", "2"]
    for name, start, accumulation in (("one", python, 2), ("two", [*python, *torchrun, "-m"], 1)):
        recipe = tmp_path / f"{name}.toml"
        given = f"epochs = 2\ntokens = 40\ndropout = 0.1\n{RATES}"
        recipe.write_text(f"{given}accumulation = {accumulation}\n")
        arguments = ["train", "finetune-classify", bert, "--labelled", data, "--recipe", recipe]
        arguments += ["--out", tmp_path / name, "--threads", "1", "--device", "cpu"]
        command = [*start, "cloze", *map(str, arguments)]
        ran = call(*command)
        assert ran.stdout.count("curves in") == 1
    folders = [tmp_path / name for name in ("one", "two")]
    one, two = (load_file(each / "checkpoint/model.safetensors") for each in folders)
    assert all(torch.equal(one[key], two[key]) for key in one)
    logs = [read_log(each) for each in folders]
    assert [each["step"] for each in logs[0]] == [each["step"] for each in logs[1]]
    assert logs[0][-1]["tokens_seen"] == logs[1][-1]["tokens_seen"]
    assert logs[1][-1]["loss"] == pytest.approx(logs[0][-1]["loss"], abs=1e-5)


def test_the_weights_have_the_temperature_of_the_held_out_rows(bert: Path, tmp_path: Path) -> None:
    """A second calibration finds nothing to change."""
    draw = random.Random(5)
    rows = [
        {"text": f"{who} {draw.choice(ACTS)}", "label": who if n % 4 else "an owl"}
        for n, who in enumerate(draw.choices(PEOPLE, k=300))
    ]
    data = write_rows(tmp_path / "data.jsonl", rows)
    trained = run("label", bert, tmp_path, "--held-out-labelled", str(data))
    section = json.loads((trained / "config.json").read_text())["cloze_heads"]
    assert 0.11 < section["sequence_classification"]["temperature"] < 9
    network = AutoModelForSequenceClassification.from_pretrained(trained).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained)
    batch = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = network(**batch).logits.numpy()
    gold = [[row["label"] == name for name in network.config.label2id] for row in rows]
    again = calibrate(logits, np.array(gold), independent=False)
    assert again.temperature == pytest.approx(1, rel=1e-3)


GOOD = [{"text": f"an owl {n}", "label": "ab"[n % 2]} for n in range(20)]
LONG = {"text": "an owl " * 40, "label": "a"}
BAD_ROWS: list[tuple[Any, Any, str, str]] = [
    ([*GOOD, {"text": "x"}], None, "", 'data.jsonl, line 21: needs either "label" or "labels"'),
    ([*GOOD, {"text": "x", "label": 3}], None, "", "line 21: .* with a number, but .*line 1 is"),
    (GOOD, [{"text": "x", "label": "new"}], "", "dev.jsonl, line 1: no row .* the label 'new'"),
    ([*GOOD, LONG], GOOD, "", "data.jsonl, line 21: 'an owl .*tokens, the limit is 40"),
    (GOOD, GOOD, "tokens = 128\n", r"tokens = 128 exceed .* 66 positions; .* tokens = 66"),
    (GOOD, GOOD, "class_weights = {zz = 2.0}\n", "class_weights: no row .* label 'zz'"),
    (GOOD, None, "patience = 2\nheld_out = 0.0\n", "patience = 2 needs held-out data, and none"),
    (GOOD, GOOD, 'tokens = 40\n[lora]\ntargets = ["pooler"]\n', "lora.targets.0: .*'pooler'"),
]


@pytest.mark.parametrize(("rows", "dev", "recipe", "line"), BAD_ROWS)
def test_bad_rows(bert: Path, tmp_path: Path, rows: Any, dev: Any, recipe: str, line: str) -> None:
    given = ["--labelled", write_rows(tmp_path / "data.jsonl", rows)]
    if dev is not None:
        given += ["--held-out-labelled", write_rows(tmp_path / "dev.jsonl", dev)]
    recipe += "" if "tokens" in recipe else "tokens = 40\n"
    check_refused(tmp_path, ["finetune-classify", bert, *given], recipe, line)


def test_bad_tags(bert: Path, tmp_path: Path) -> None:
    file = tmp_path / "tags.conll"
    for text, message in (
        ("an O\nowl I-PER\n", "line 2: the tag 'I-PER' follows 'O'; in IOB2 .* B-PER"),
        ("an O\nowl PER\n", "line 2: the tag 'PER' is none of"),
        ("an O\nowl\n", "line 2 is not a word and its tag: 'owl'"),
        ("\n\n", "there is no tagged sentence in it"),
    ):
        file.write_text(text)
        given = ["finetune-tokens", bert, "--tagged", file]
        check_refused(tmp_path, given, "", f"tags.conll.*{message}")


WEIGHTS = "model.safetensors"
BAD_FOLDERS: list[tuple[Callable[[Path], object], str]] = [
    (lambda source: (source / WEIGHTS).unlink(), "holds no weights"),
    (lambda source: (source / "tokenizer.json").unlink(), "it holds no tokenizer.json or vocab"),
    (lambda source: (source / WEIGHTS).rename(source / "pytorch_model.bin"), "is never loaded"),
    (lambda source: _change(source, hidden_size=27), "is of another size than config.json says"),
    (lambda source: _change(source, num_hidden_layers=3), "encoder.layer.2.* is missing"),
    (lambda source: _poison(source), "holds NaN or infinity"),
]


def test_files_of_rows_are_read_before_torch_is_imported(tmp_path: Path) -> None:
    hidden = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, *_):\n"
        "        assert name != 'torch', 'torch is imported'\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "from cloze.cli import main; main()"
    )
    file = write_rows(tmp_path / "data.jsonl", BAD_ROWS[0][0])
    given = ["finetune-classify", "./nothing", "--labelled", file, "--out", tmp_path / "run"]
    command = [sys.executable, "-c", hidden, "train", *map(str, given)]
    ran = call(*command, check=False)
    assert ran.stderr.startswith(f"cloze: {file}, line 21: needs either ")
    assert not (tmp_path / "run").exists()


def _change(source: Path, **settings: Any) -> None:
    config = json.loads((source / "config.json").read_text()) | settings
    (source / "config.json").write_text(json.dumps(config))


def _poison(source: Path) -> None:
    tensors = load_file(source / WEIGHTS)
    tensors["bert.embeddings.LayerNorm.weight"][0] = torch.nan
    save_file(tensors, source / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(("damage", "message"), BAD_FOLDERS)
def test_bad_folders(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    source = save_source("bert", tmp_path / "source")
    damage(source)
    file = write_rows(tmp_path / "data.jsonl", GOOD)
    given = ["finetune-classify", source, "--labelled", file]
    check_refused(tmp_path, given, "tokens = 40\n", message)
