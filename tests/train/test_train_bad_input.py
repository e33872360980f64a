"""Bad input of `cloze train` gets one line; what ends a run early leaves the last checkpoint."""

import lzma
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from cloze.cli import cli
from cloze.export.train.progress import read_log
from cloze.export.train.run_dir import locked
from tests.support.fine_tuning import slow_but

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(900)]

RECIPE = """
seed = 1
held_out = 0.1
vocabulary = {size = 120}
pretraining = {sentence = "nsp"}
optimisation = {learning_rate = 3e-3, precision = "fp32"}
phases = [{tokens = 16, sequences = 4, steps = 10}]
[model]
hidden_size = 32
layers = 1
heads = 2
intermediate_size = 64
max_tokens = 32
dropout = 0.1
"""
LONG = RECIPE.replace("steps = 10", "steps = 300")
ALONE = "next-sentence prediction needs at least 2 documents"
SINGLE = RECIPE.replace('"nsp"', '"none"')
FURTHER = RECIPE.partition("[model]")[0].replace("vocabulary = {size = 120}", "")
LINE = '{"text": "The old king sang a song."}\n'


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, stories: Path) -> Path:
    """The folder of a run of `RECIPE` that nothing disturbed; tests that change it work on a copy."""
    return done(tmp_path_factory.mktemp("finished") / "run", RECIPE, stories)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, stories: Path) -> Path:
    """The folder of a run of `LONG`, long enough to be caught in the middle."""
    return done(tmp_path_factory.mktemp("undisturbed") / "run", LONG, stories)


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copy(finished.parent / "recipe.toml", tmp_path)
    return shutil.copytree(finished, tmp_path / "run")


def train(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["train", *map(str, arguments)])


def refused(*arguments: object) -> str:
    """What follows ``cloze: `` in the one line that says why."""
    result = train(*arguments)
    assert isinstance(result.exception, SystemExit), f"{result.exception!r}\n{result.stderr}"
    assert result.exit_code == 1, result.output
    return the_line(result.stderr)


def the_line(stderr: str) -> str:
    lines = stderr.splitlines()
    assert [line.startswith("cloze: ") for line in lines].count(True) == 1, stderr
    assert lines[-1].startswith("cloze: "), stderr
    assert "Traceback" not in stderr
    return lines[-1].removeprefix("cloze: ")


def pretrain_command(folder: Path, recipe: str, *text: Path) -> list[str]:
    """The recipe lies beside the run's folder."""
    file = folder.parent / "recipe.toml"
    file.write_text(recipe)
    given = [part for name in text for part in ("--corpus", str(name))]
    return ["pretrain", *given, "--recipe", str(file), "--out", str(folder), "--device", "cpu"]


def done(folder: Path, recipe: str, text: Path) -> Path:
    result = train(*pretrain_command(folder, recipe, text))
    assert result.exit_code == 0, result.output
    return folder


def weights(folder: Path) -> bytes:
    return (folder / "checkpoint/model.safetensors").read_bytes()


def state(folder: Path) -> dict[str, object]:
    return torch.load(folder / "state.pt", weights_only=True)


PACKED = lzma.compress(LINE.encode() * 999)
ALL_HELD_OUT = SINGLE.replace("held_out = 0.1", "held_out = 0.999999")
BAD_TEXTS = [
    ("empty.jsonl", b"\n", RECIPE, "there is no text: "),
    ("one.txt", b"The king sang a song. An owl saw it.\n", RECIPE, ALONE),
    ("held-out.txt", b"The king sang.\n", ALL_HELD_OUT, "no document is left"),
    ("latin.txt", b"a\n\xe9", RECIPE, "{file}, line 2 is not UTF-8 text"),
    ("cut.jsonl.xz", PACKED[:-20], RECIPE, "{file} is no whole .xz file"),
    ("type.jsonl", b'{"text": 1}\n', RECIPE, "{file}, line 1: text: Input should be a valid "),
]


@pytest.mark.parametrize(
    ("name", "content", "recipe", "message"), BAD_TEXTS, ids=[row[0] for row in BAD_TEXTS]
)
def test_a_bad_text(
    finished: Path, tmp_path: Path, name: str, content: bytes, recipe: str, message: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    command = pretrain_command(tmp_path / "run", recipe, file)
    line = refused(*command, "--vocab", finished / "vocabulary")
    assert line.startswith(message.format(file=file))
    assert not (tmp_path / "run/checkpoint").exists()


SONGS = ["The old king sang a song.", "犬 猫 犬 猫 犬"] * 20
KING = SINGLE.replace("held_out = 0.1", "held_out = 0.0")


@pytest.mark.parametrize(
    ("recipe", "documents"), [(KING, ["king"]), (SINGLE, SONGS), (RECIPE, SONGS)]
)
def test_little_text_and_unknown_words_are_learnt_from(
    finished: Path, tmp_path: Path, recipe: str, documents: list[str]
) -> None:
    """One sequence a batch: of unknown words, some batch would have no word to mask."""
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(documents))
    recipe = recipe.replace("sequences = 4", "sequences = 1")
    command = pretrain_command(tmp_path / "run", recipe, file)
    result = train(*command, "--vocab", finished / "vocabulary")
    assert result.exit_code == 0, result.output
    assert weights(tmp_path / "run")


SUM = "optimisation: warmup = 0.5 and decay = 0.6 exceed the run: their sum must be at most 1"
BOUNDARY = "pretraining: span_boundary = true needs unit = 'span' and method = 'mlm'"
REPLACED = '"none", method = "rtd", keep_embeddings = true'
BAD_RECIPES = [
    ("size = 120", "sise = 120", "unknown key vocabulary.sise"),
    ("steps = 10", "steps = 0", "phases.0.steps: Input should be greater than 0, got 0"),
    ("size = 120", 'size = "120"', "vocabulary.size: Input should be a valid integer, got '120'"),
    ("heads = 2", "heads = 3", "model: hidden size 32 is not a multiple of the 3 attention heads"),
    ("precision", "warmup = 0.5, decay = 0.6, precision", SUM),
    ('"nsp"', REPLACED, "pretraining: keep_embeddings needs method = 'mlm'"),
    ('"nsp"', '"nsp", span_boundary = true', BOUNDARY),
]


@pytest.mark.parametrize(("old", "new", "message"), BAD_RECIPES)
def test_a_bad_recipe(stories: Path, tmp_path: Path, old: str, new: str, message: str) -> None:
    assert RECIPE.count(old) == 1
    command = pretrain_command(tmp_path / "run", RECIPE.replace(old, new), stories)
    assert refused(*command).startswith(f"recipe.toml: {message}")
    assert not (tmp_path / "run").exists()


def test_a_device_that_cannot_be_used(stories: Path, tmp_path: Path) -> None:
    command = pretrain_command(tmp_path / "run", RECIPE, stories)
    for name in ("", "gpu", "meta", "cpu:1", "cuda:-1"):
        message = f"device {name!r} is unknown; auto, cpu, cuda or cuda:N"
        assert refused(*command, "--device", name) == message
    if not torch.cuda.is_available():
        for name in ("cuda", "cuda:1"):
            line = refused(*command, "--device", name)
            assert re.match("device 'cuda.*' cannot be used: .+", line)


def test_a_vocabulary_that_cannot_be_used(finished: Path, stories: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vocabulary"
    command = [*pretrain_command(tmp_path / "run", RECIPE, stories), "--vocab", folder]
    assert refused(*command) == f"no directory {folder}"
    folder.mkdir()
    assert refused(*command).startswith(f"{folder} cannot be loaded: ")
    whole = (finished / "vocabulary/tokenizer.json").read_bytes()
    for damaged in (b"{}", whole[:-9], b"\xff" + whole):
        (folder / "tokenizer.json").write_bytes(damaged)
        assert refused(*command).startswith(f"{folder} cannot be loaded: ")


def test_what_does_not_apply_is_said(finished: Path, stories: Path, tmp_path: Path) -> None:
    def line(recipe: str, *given: object) -> str:
        return refused(*pretrain_command(tmp_path / "run", recipe, stories), *given)

    started = ("--from", finished / "checkpoint")
    vocabulary = ("--vocab", finished / "vocabulary")
    assert line(FURTHER, *started, *vocabulary).startswith("a vocabulary is given, but sizes")
    assert line(RECIPE, *started).startswith("[model] heads, hidden_size, ")
    assert line(RECIPE.replace('"nsp"', '"nsp", keep_embeddings = true')) == (
        "keep_embeddings = true needs a checkpoint whose embeddings to keep: name one with --from"
    )
    replaced = FURTHER.replace('"nsp"', '"none", method = "rtd"')
    assert "not with replaced ones" in line(replaced, *started)
    for recipe, given in ((RECIPE, ()), (FURTHER, started)):
        recipe = recipe.replace("tokens = 16", "tokens = 64")
        assert line(recipe, *given) == "a phase of 64 tokens exceeds the model's 32 positions"


def test_a_folder_of_another_run(copy: Path, stories: Path, tmp_path: Path) -> None:
    before = weights(copy)
    file, shorter = tmp_path / "file", tmp_path / "shorter.txt"
    file.write_text("")
    assert refused(*pretrain_command(file, RECIPE, stories)) == f"{file} is not a folder"
    assert str(file) in refused("vocab", "--corpus", stories, "--size", "120", "--out", file)
    shorter.write_bytes(stories.read_bytes()[:-1])
    for what, recipe, text, given in (
        ("of another recipe", RECIPE.replace("steps = 10", "steps = 11"), stories, ()),
        ("with another text", RECIPE, shorter, ()),
        ("with another vocabulary", RECIPE, stories, ("--vocab", copy / "vocabulary")),
    ):
        assert refused(*pretrain_command(copy, recipe, text), *given) == (
            f"{copy} holds a run {what}; give another folder, or remove it"
        )
    assert weights(copy) == before
    for content in ("", "[]", '{"recipe": 1}'):
        (copy / "run.json").write_text(content)
        line = refused(*pretrain_command(copy, RECIPE, stories))
        assert line.endswith("; give another folder, or remove it")


def test_a_failed_try_has_no_claim_on_a_folder(
    finished: Path, stories: Path, tmp_path: Path
) -> None:
    folder, too_little = tmp_path / "run", tmp_path / "little.txt"
    too_little.write_text("The king sang a song and read a book. " * 9)
    line = refused(*pretrain_command(folder, RECIPE, too_little))
    assert "ask for less or give more text" in line
    little = RECIPE.replace("size = 120", "size = 32")
    assert "needs at least 2 documents" in refused(*pretrain_command(folder, little, too_little))
    assert weights(done(folder, RECIPE, stories)) == weights(finished)


def test_a_damaged_state_or_log(copy: Path, finished: Path, stories: Path) -> None:
    file, command = copy / "state.pt", pretrain_command(copy, RECIPE, stories)
    whole, parts = file.read_bytes(), state(copy)
    damages = [whole[:-100], b"", whole[:200] + bytes(200) + whole[400:]]
    for other in ([1], {"step": 3}, parts | {"module": {"weight": torch.zeros(2)}}):
        torch.save(other, file)
        damages.append(file.read_bytes())
    for content in damages:
        file.write_bytes(content)
        line = refused(*command)
        assert line.startswith(f"{file} is damaged or of another model (")
        assert line.endswith("); remove it to begin anew")
    file.write_bytes(whole)
    log = copy / "log.jsonl"
    log.write_bytes(b"5\n\xff\n[1]\n{}\n")
    assert refused(*command).startswith(f"{log} of the finished run is damaged")
    file.unlink()
    assert train(*command).exit_code == 0, "what the line says helps"
    assert weights(copy) == weights(finished)


def test_damaged_tokens(copy: Path, finished: Path, stories: Path) -> None:
    command = pretrain_command(copy, RECIPE, stories)
    message = f"the tokenized text in {copy / 'corpus'} is damaged (train); remove that folder"
    for name in ("train.tokens", "train.sentences.npy", "train.documents.npy"):
        file = copy / "corpus" / name
        whole = file.read_bytes()
        for cut in (2, len(whole) - 2):
            file.write_bytes(whole[:cut])
            assert refused(*command) == message
        file.write_bytes(whole)
    tokens = copy / "corpus/train.tokens"
    tokens.unlink()
    assert refused(*command) == message
    for content in ("{", "[]"):
        (copy / "corpus/corpus.json").write_text(content)
        assert train(*command).exit_code == 0
    assert tokens.read_bytes() == (finished / "corpus/train.tokens").read_bytes()


def start(command: list[str]) -> subprocess.Popen[str]:
    """The command as a process of its own, on one thread."""
    # The limits would also break the files of a measurement of coverage.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "cloze", "train", *command, "--threads", "1"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=kept | {"OMP_NUM_THREADS": "1"},
    )


def steps_logged(folder: Path) -> list[int]:
    return [line["step"] for line in read_log(folder)]


@contextmanager
def caught_in_the_middle(folder: Path, text: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of `LONG` that is in the steps after its first checkpoint, of step 100."""
    process, deadline = start(pretrain_command(folder, LONG, text)), time.monotonic() + 300
    try:
        while 120 not in steps_logged(folder):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.002)
        yield process
    finally:
        process.kill()
        process.communicate()


FULL_DISKS = [100, 20_000] if hasattr(resource, "prlimit") else []
"""Bytes that a file may have: too few for the log, or for the next checkpoint."""


@pytest.mark.parametrize(
    "end", slow_but([signal.SIGKILL, signal.SIGTERM, *FULL_DISKS], signal.SIGKILL), ids=str
)
def test_a_run_that_ends_early_goes_on_as_if_it_had_not(
    undisturbed: Path, stories: Path, tmp_path: Path, end: int
) -> None:
    """Killed, interrupted, or on a full disk: its last checkpoint is whole."""
    folder = tmp_path / "run"
    kept = f"the checkpoint in {folder} is kept"
    with caught_in_the_middle(folder, stories) as process:
        if end in FULL_DISKS:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (end, end))
        else:
            process.send_signal(end)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == (-signal.SIGKILL if end == signal.SIGKILL else 1)
    line = "" if end == signal.SIGKILL else the_line(stderr)
    step = state(folder)["step"]
    assert not (folder / "state.pt.new").exists() or end == signal.SIGKILL
    if end == signal.SIGTERM:
        assert line == f"interrupted; {kept}, the same command goes on from there"
        assert 120 <= step == steps_logged(folder)[-1] < 300
    else:
        assert step in (100, 200)
    if end == signal.SIGKILL:
        (folder / "state.pt.new").write_bytes(b"of a kill while it was written")
    elif end in FULL_DISKS:
        full = re.escape(f"cannot be written: File too large; {kept}")
        assert re.fullmatch(rf"(the run|the checkpoint of step \d+) {full}", line)
    result = train(*pretrain_command(folder, LONG, stories))
    assert result.exit_code == 0, result.output
    assert f"going on after step {step} of 300" in result.stderr
    assert weights(folder) == weights(undisturbed)
    logged = [each for each in steps_logged(folder) if each != step]
    assert logged == [each for each in steps_logged(undisturbed) if each != step]


@pytest.mark.slow
def test_an_interruption_before_the_first_step(stories: Path, tmp_path: Path) -> None:
    """While the text is read: at once, and nothing half done is taken for done."""
    long_text, folder = tmp_path / "long.txt", tmp_path / "run"
    long_text.write_text(stories.read_text() * 100)
    process = start(pretrain_command(folder, RECIPE, long_text))
    assert process.stderr.readline() == "learning a vocabulary of 120 tokens\n"
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    kept = "what is saved is kept, the same command goes on from there"
    assert the_line(stderr) == f"interrupted; {kept}"
    assert not (folder / "vocabulary/tokenizer.json").exists()
    assert not (folder / "corpus/corpus.json").exists()


def test_a_disk_that_is_full_when_a_run_begins_or_has_ended(
    copy: Path, finished: Path, stories: Path, tmp_path: Path
) -> None:
    new, (soft, hard) = tmp_path / "new", resource.getrlimit(resource.RLIMIT_FSIZE)
    commands = {folder: pretrain_command(folder, RECIPE, stories) for folder in (new, copy)}
    for command in commands.values():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, hard))
        try:
            assert "File too large" in refused(*command)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(new.glob("state.pt*"))
    assert (copy / "state.pt").read_bytes() == (finished / "state.pt").read_bytes()
    assert weights(copy) == weights(finished)
    for folder, command in commands.items():
        assert train(*command).exit_code == 0
        assert weights(folder) == weights(finished)


def test_a_second_run_names_the_first(finished: Path, stories: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = pretrain_command(folder, RECIPE, stories)
    with locked(folder):
        assert refused(*command) == (
            f"process {os.getpid()} on {socket.gethostname()} runs in {folder}; "
            "end it first, or give another folder"
        )
        assert {file.name for file in folder.iterdir()} == {"lock", "owner"}
    assert weights(done(folder, RECIPE, stories)) == weights(finished)


@pytest.mark.slow
def test_a_loss_that_is_no_number_any_more(stories: Path, tmp_path: Path) -> None:
    """The checkpoint from which the run goes on has weights whose products overflow."""
    folder = tmp_path / "run"
    with caught_in_the_middle(folder, stories) as process:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
    kept = state(folder)
    for name, tensor in kept["module"].items():
        if "word" in name:
            tensor.fill_(3e38)
    torch.save(kept, folder / "state.pt")
    before = (folder / "state.pt").read_bytes()
    line = refused(*pretrain_command(folder, LONG, stories))
    found = re.match(r"(the loss is (nan|inf)|a weight is no number any more) at step (\d+)", line)
    assert found, line
    assert line.endswith(f"; the checkpoint in {folder} is kept; try a lower learning_rate")
    assert kept["step"] < int(found[3]) <= kept["step"] + 100
    assert (folder / "state.pt").read_bytes() == before
    assert all(line["loss"] < float("inf") for line in read_log(folder))
    assert refused(*pretrain_command(folder, LONG, stories)) == line
