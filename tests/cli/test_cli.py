"""The command line as a user types it."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cloze.service.settings import Settings
from tests.support.command import cloze
from tests.support.ports import free_port


def test_a_checkpoint_becomes_a_bundle_that_can_be_looked_at_and_removed(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    store = ("--model-store", str(tmp_path / "store"))
    done = cloze(
        "export",
        str(checkpoints["bert"]),
        "--name",
        "tiny",
        "--task",
        "embed",
        "--task",
        "fill-mask",
        *store,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny@1: embed, fill-mask; differs from torch by ")
    assert "note: qa is not offered" in done.stderr

    assert cloze("store", "list", *store).stdout.startswith("tiny@1 ")
    manifest = json.loads(cloze("store", "show", "tiny@1", *store).stdout)
    assert manifest["tasks"] == ["embed", "fill-mask"]
    operators = manifest["graph"]["operators"]
    fused = ("MultiHeadAttention", "LayerNormalization", "BiasGelu")
    assert [operators[name] for name in fused] == [2, 6, 3]
    assert (
        cloze("store", "verify", CLOZE_MODEL_STORE=str(tmp_path / "store")).stdout == "tiny@1  ok\n"
    )

    weights = tmp_path / "store" / "tiny" / "1" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    broken = cloze("store", "verify", "tiny", *store)
    assert broken.returncode == 1
    assert (
        broken.stderr
        == "cloze: bundle tiny@1: weights.bin was changed after it was published (wrong sha256)\n"
    )

    assert (
        cloze("export", str(checkpoints["distilbert"]), "--name", "other", *store).returncode == 0
    )
    same = ("export", str(checkpoints["distilbert"]), "--name", "other", "--json", *store)
    found = cloze(*same)
    assert json.loads(found.stdout)["version"] == 1
    assert "the store has this export as other@1; nothing is written" in found.stderr
    assert json.loads(cloze(*same, "--again").stdout)["version"] == 2
    cloze("store", "remove", "other@2", "--yes", *store)
    (tmp_path / "store" / "tiny" / "1" / "manifest.json").write_text("{}")
    listed = cloze("store", "list", *store)
    assert listed.returncode == 1, "one damaged bundle"
    assert listed.stdout.startswith("other@1 "), "hides no other"
    assert "the manifest of tiny@1 is refused" in listed.stderr
    cloze("store", "remove", "other", "--yes", *store)

    refused = cloze("store", "remove", "tiny", *store)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "this would remove tiny@1 for good; confirm with --yes" in refused.stderr
    assert (tmp_path / "store" / "tiny" / "1").is_dir()
    assert cloze("store", "remove", "tiny@1", "--yes", *store).stdout == (
        "removed tiny@1; a running server has it in memory until it reloads or stops\n"
    )
    assert cloze("store", "list", *store).stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("export", "./nowhere", "--name", "x"), 1, "cloze: no directory ./nowhere\n"),
        (
            ("store", "show", "x"),
            1,
            "cloze: no bundle named 'x' in {store} (available: none; `cloze export` makes one)\n",
        ),
        (("store", "remove", "x@0"), 1, "cloze: '0' is not a version: versions are 1, 2, 3, ...\n"),
        (
            ("serve",),
            2,
            "cloze: the model store {store} has no bundle; make one with `cloze export SOURCE --name NAME`\n",
        ),
        (
            ("serve", "--port", "99999"),
            2,
            "cloze: --port: input should be less than or equal to 65535, got '99999'\n",
        ),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    store = str(tmp_path / "missing")
    done = cloze(*arguments, CLOZE_MODEL_STORE=store)
    assert done.returncode == code
    assert done.stderr.splitlines(keepends=True)[-1] == message.format(store=store)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "x"), "give --name for a bundle"),
        (("export", "x", "--name", "../x"), "1 to 64 of letters"),
        (("export", "x", "--name", "x", "--task", "translate"), "'translate' is not one of"),
        (("nonsense",), "No such command 'nonsense'"),
    ],
)
def test_wrong_usage_says_so(arguments: tuple[str, ...], message: str) -> None:
    done = cloze(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_document_has_every_command() -> None:
    """And every setting is in the page of settings."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, root / "scripts/command-reference", "--check"])
    assert done.returncode == 0, "run scripts/command-reference"
    assert "## cloze train evaluate" in (root / "docs" / "commands.md").read_text()


def test_a_task_without_a_head_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    done = cloze(
        "export",
        str(checkpoints["distilbert"]),
        "--name",
        "x",
        "--task",
        "nsp",
        "--model-store",
        str(tmp_path),
    )
    assert done.returncode == 1
    assert done.stderr.endswith(
        "cloze: the checkpoint cannot do nsp: it has heads for fill-mask, embed, embed-all, sparse, "
        "embed-layers; nsp is not offered: the checkpoint has no tensors for it\n"
    )
    assert not list(tmp_path.iterdir())


def test_a_taken_port_is_one_line(tiny_store: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = cloze("serve", "--port", str(port), "--model-store", str(tiny_store))
    assert done.returncode == 2
    assert done.stderr == f"cloze: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_two_servers_on_one_port(tiny_store: Path) -> None:
    """Both may have taken it while their models loaded; one of them says so and ends."""
    port = str(free_port())
    command = [
        sys.executable,
        "-m",
        "cloze",
        "serve",
        "--port",
        port,
        "--model-store",
        str(tiny_store),
    ]
    twins = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    deadline = time.monotonic() + 30
    while all(twin.poll() is None for twin in twins) and time.monotonic() < deadline:
        time.sleep(0.05)
    ended = [twin for twin in twins if twin.poll() is not None]
    for twin in twins:
        if twin.poll() is None:
            twin.terminate()
    outputs = [twin.communicate(timeout=30)[1] for twin in twins]
    assert [twin.returncode for twin in ended] == [2]
    assert outputs[twins.index(ended[0])].endswith(
        f"cloze: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )


@pytest.mark.parametrize("delay_s", [0.0, 0.3, 0.6, 0.9, 1.2])
def test_a_signal_during_the_start_ends_it(tiny_store: Path, delay_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "cloze", "serve", "--port", "0", "--model-store", str(tiny_store)],
        stderr=subprocess.PIPE,
    )
    time.sleep(delay_s)
    process.terminate()
    process.communicate(timeout=15)
    assert process.returncode in (0, 143, -15)


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
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, "")
    assert not list(tmp_path.iterdir()), "the temporary folder is still there"


def test_an_unknown_model_and_a_misspelt_variable(tiny_store: Path) -> None:
    done = cloze("serve", "--model", "nobody", "--model-store", str(tiny_store), CLOZE_PROT="1")
    assert done.returncode == 2
    assert "the variable CLOZE_PROT is not a setting" in done.stderr
    assert done.stderr.endswith(
        f"cloze: no bundle named 'nobody' in {tiny_store} (available: bert, bert-qa, distilbert)\n"
    )


def test_help_names_every_setting_and_every_command() -> None:
    text = cloze("serve", "--help").stdout
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in text
        assert f"CLOZE_{name.upper()}" in text.replace("\n", "").replace(" ", "")
    assert {"export", "serve", "store"} <= set(cloze("--help").stdout.split())
    assert "sentence-transformers directory" in cloze("export", "--help").stdout
