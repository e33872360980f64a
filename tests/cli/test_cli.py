"""The command line as a user types it."""

import contextlib
import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cloze.service.settings import Settings
from tests.support.command import call, cloze, cloze_here
from tests.support.ports import free_port
from tests.support.refusals import check_table
from tests.support.serving import bare_environment
from tests.support.waiting import wait_until


def test_a_checkpoint_becomes_a_bundle_that_can_be_looked_at_and_removed(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    store = ("--model-store", str(tmp_path / "store"))
    tasks = ("--task", "embed", "--task", "fill-mask")
    done = cloze_here("export", str(checkpoints["bert"]), "--name", "tiny", *tasks, *store)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("tiny@1 differs from torch by ")
    offered = "fill-mask, score, embed, similarity"
    assert done.stdout.endswith(f"\ntiny@1 offers {offered}\n")
    assert "  heads for fill-mask, embed\n" in done.stderr
    assert "is not offered" not in done.stderr

    assert cloze_here("store", "list", *store).stdout.startswith("tiny@1 ")
    manifest = json.loads(cloze_here("store", "show", "tiny@1", *store).stdout)
    assert manifest["tasks"] == ["embed", "fill-mask"]
    verified = cloze_here("store", "verify", CLOZE_MODEL_STORE=str(tmp_path / "store"))
    assert verified.stdout == "tiny@1  ok\n"

    weights = tmp_path / "store" / "tiny" / "1" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    broken = cloze_here("store", "verify", "tiny", *store)
    assert broken.exit_code == 1
    assert broken.stderr.startswith("cloze: bundle tiny@1: weights.bin was changed after")

    other = ("export", str(checkpoints["distilbert"]), "--name", "other", "--json", *store)
    assert cloze_here(*other).exit_code == 0
    found = cloze_here(*other)
    assert json.loads(found.stdout)["version"] == 1
    assert "the store has this export as other@1; nothing is written" in found.stderr
    assert json.loads(cloze_here(*other, "--again").stdout)["version"] == 2
    cloze_here("store", "remove", "other@2", "--yes", *store)
    (tmp_path / "store" / "tiny" / "1" / "manifest.json").write_text("{}")
    listed = cloze_here("store", "list", *store)
    assert listed.exit_code == 1, "one damaged bundle"
    assert listed.stdout.startswith("other@1 "), "hides no other"
    assert "the manifest of tiny@1 is refused" in listed.stderr

    refused = cloze_here("store", "remove", "tiny", *store)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert (tmp_path / "store" / "tiny" / "1").is_dir()
    removed = cloze_here("store", "remove", "tiny@1", "--yes", *store)
    assert removed.stdout.startswith("removed tiny@1; ")
    cloze_here("store", "remove", "other", "--yes", *store)
    assert cloze_here("store", "list", *store).stdout == ""


ERRORS = Path(__file__).with_name("errors.txt")


def test_what_is_wrong_is_one_line(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """`errors.txt` has the model, the command, its exit code, and how its error ends.

    With ``REWRITE_WORDING=1`` in the environment, the file gets what is said.
    """
    places = {"missing": tmp_path / "missing"}

    def outcome(kind: str, command: str) -> str:
        named = places | {"model": checkpoints[kind]}
        words = [word.format(**named) for word in shlex.split(command)]
        done = cloze_here(*words, CLOZE_MODEL_STORE=str(tmp_path / "missing"))
        assert done.stdout == ""
        said = done.stderr.partition("cloze: ")[2] or done.stderr.partition("Error: ")[2]
        for name, place in named.items():
            said = said.replace(str(place), f"{{{name}}}")
        return f"{done.exit_code} {said.removesuffix(chr(10))}"

    check_table(ERRORS, outcome)
    assert not list(tmp_path.iterdir())


def test_a_misspelt_variable_is_told_where_variables_are_read(tmp_path: Path) -> None:
    store = str(tmp_path / "missing")
    for words, is_told in ((("serve",), True), (("store", "show", "x"), False)):
        done = cloze(*words, CLOZE_MODEL_STORE=store, CLOZE_PROT="1")
        assert ("the variable CLOZE_PROT is not a setting" in done.stderr) == is_told
        assert done.stderr.splitlines()[-1].startswith("cloze: ")


BULK, STORE = ("bulk", "embed", "{in}", "--output", "{out}"), ("--model-store", "{out}")


@pytest.mark.parametrize(
    ("missing", "arguments", "code", "advice"),
    [
        ("onnxruntime", ("doctor", "--model-store", "{store}"), 1, "pip install"),
        ("cloze.bench.command", ("bench", "run"), 1, "[bench]"),
        ("hdrh", ("bench", "run"), 1, "[bench]"),
        ("pyarrow", BULK, 2, "[cpu,bulk]"),
        ("ray", (*BULK, "--ray"), 2, "[cpu,ray]"),
        ("torch", ("serve", "--model", "{in}/..", *STORE), 2, "export"),
        ("cloze.export", ("serve", "--model", "s3://a/b", *STORE), 2, "run `cloze fetch` where"),
    ],
)
def test_what_is_not_installed_is_named_with_the_way_to_get_it(
    missing: str, arguments: tuple[str, ...], code: int, advice: str,
    tiny_store: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """As in an image, and in an installation without an extra."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/config.json").write_text("{}")
    (tmp_path / "checkpoint/in.jsonl").write_text('{"text": "a"}\n')
    places = {"in": tmp_path / "checkpoint/in.jsonl", "out": tmp_path / "out", "store": tiny_store}
    hidden = f"import sys; sys.modules['{missing}'] = None\nfrom cloze.cli import main; main()"
    done = call(
        sys.executable,
        "-c",
        hidden,
        *(word.format(**places) for word in arguments),
        check=False,
        env=bare_environment(COLUMNS="500"),
    )
    assert done.returncode == code, done.stderr
    said = done.stdout if arguments[0] == "doctor" else done.stderr
    assert any(advice in line for line in said.splitlines()), said
    assert "Traceback" not in done.stderr


def test_two_servers_on_one_port(tiny_store: Path) -> None:
    """Both may have taken it while their models loaded; one of them says so and ends."""
    port = str(free_port())
    serve = ("serve", "--port", port, "--model-store", str(tiny_store))
    command = [sys.executable, "-m", "cloze", *serve]
    twins = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    with contextlib.suppress(AssertionError):
        wait_until(lambda: any(twin.poll() is not None for twin in twins), 30)
    ended = [twin for twin in twins if twin.poll() is not None]
    for twin in twins:
        if twin.poll() is None:
            twin.terminate()
    outputs = [twin.communicate(timeout=30)[1] for twin in twins]
    assert [twin.returncode for twin in ended] == [2]
    said = outputs[twins.index(ended[0])]
    assert said.endswith(f"cannot listen on 127.0.0.1:{port}: Address already in use\n")


def test_a_question_starts_without_what_the_other_commands_import() -> None:
    question = ("ask", "embed", "x", "--url", "http://localhost:1")
    command = [sys.executable, "-X", "importtime", "-m", "cloze", *question]
    done = call(*command, check=False, env=bare_environment())
    assert "cloze: no answer from http://localhost:1: " in done.stderr
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "cloze.ask" in modules
    assert not modules & {"pydantic", "cloze.cli", "cloze.model_store.manifest", "onnxruntime"}


@pytest.mark.parametrize(
    "words", ["store show", "store verify bert-qa@1", "serve --model", "bulk embed --model"]
)
def test_names_of_bundles_complete(words: str, tiny_store: Path) -> None:
    line = f"cloze {words} bert"
    position = str(len(line.split()) - 1)
    shell = {"_CLOZE_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": position}
    done = cloze(CLOZE_MODEL_STORE=str(tiny_store), **shell)
    names = ["bert", "bert-qa", "bert-qa@1", "bert@1"]
    assert sorted(done.stdout.split()) == [f"plain,{name}" for name in names]


def test_a_used_port_is_told_before_anything_is_exported(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        places = ("--model", str(checkpoints["bert"]), "--model-store", str(tmp_path / "store"))
        done = cloze_here("serve", "--port", port, *places)
    assert done.exit_code == 2
    assert done.stderr == f"cloze: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert not (tmp_path / "store").exists()


_SIGNAL_DURING = {
    "the creation of a class": """
class Attribute:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.SIGTERM)
class Owner:
    attribute = Attribute()
""",
    "a callback of a weak reference": """
referent = type("Referent", (), {})()
reference = weakref.ref(referent, lambda _: signal.raise_signal(signal.SIGTERM))
del referent
""",
}
"""Code in which Python replaces or ignores an exception that the handler of a signal raises."""


@pytest.mark.parametrize("moment", _SIGNAL_DURING)
def test_a_signal_during_the_start_ends_it_whatever_runs(moment: str, tmp_path: Path) -> None:
    lines = [
        "import signal, tempfile, weakref",
        "from cloze.service.server.startup import begin",
        "from cloze.service.settings import Settings",
        "begin(Settings())",
        f"folder = tempfile.TemporaryDirectory(dir={str(tmp_path)!r})",
        _SIGNAL_DURING[moment],
    ]
    done = call(sys.executable, "-c", "\n".join(lines), check=False)
    assert (done.returncode, done.stderr) == (143, "")
    assert not list(tmp_path.iterdir()), "the temporary folder is still there"


def test_help_names_every_setting_and_every_command() -> None:
    text = cloze_here("serve", "--help").stdout
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in text
        assert f"CLOZE_{name.upper()}" in text.replace("\n", "").replace(" ", "")
    assert {"export", "serve", "store"} <= set(cloze_here("--help").stdout.split())
