"""Loading from a hub, against a small one of our own on loopback that speaks the routes
huggingface_hub uses.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloze.model_store import Store
from tests.support.command import call
from tests.support.fake_hub import COMMIT, FakeHub, running_hub
from tests.support.serving import bare_environment


@pytest.fixture
def hub(checkpoints: dict[str, Path]) -> Iterator[FakeHub]:
    with running_hub(checkpoints["bert"]) as hub:
        yield hub


def export(
    endpoint: str, tmp_path: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return python(
        endpoint, tmp_path, "-m", "cloze", "export", *arguments, "--name", "x",
        "--model-store", str(tmp_path / "store"), **environment,
    )  # fmt: skip


def python(
    endpoint: str, tmp_path: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1"}
    return call(
        sys.executable,
        *arguments,
        check=False,
        timeout=120,
        env=bare_environment(**own) | environment,
    )


@pytest.mark.parametrize("revision", [(), ("--revision", "v1")])
def test_a_hub_id_is_downloaded_at_one_commit_that_is_recorded(
    hub: FakeHub, tmp_path: Path, revision: tuple[str, ...]
) -> None:
    done = export(hub.url, tmp_path, "tiny/bert", *revision)
    assert done.returncode == 0, done.stderr
    manifest = Store(tmp_path / "store").open("x").manifest
    assert manifest.source.kind == "hub"
    assert manifest.source.location == "tiny/bert"
    assert manifest.source.revision == COMMIT
    assert manifest.license == "apache-2.0"
    assert not [
        path
        for path in hub.asked
        if "pytorch_model.bin" in path or "tf_model" in path or "adapter" in path
    ]
    assert "%" in done.stderr, "a progress bar"


def test_what_was_downloaded_before_needs_no_hub(hub: FakeHub, tmp_path: Path) -> None:
    assert export(hub.url, tmp_path, "tiny/bert", "--revision", COMMIT).returncode == 0
    asked = len(hub.asked)
    again = ("--revision", COMMIT, "--again")
    done = export(hub.url, tmp_path, "tiny/bert", *again, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert Store(tmp_path / "store").manifest("x@2").source.revision == COMMIT
    assert len(hub.asked) == asked


@pytest.mark.parametrize("name", ["sentencepiece.bpe.model", "spm.model"])
def test_a_sentencepiece_model_is_downloaded_and_found_offline(
    hub: FakeHub, tmp_path: Path, name: str
) -> None:
    """microsoft/deberta-v3-base, for example, has no other file of a tokenizer."""
    hub.files = {"config.json": b"{}", name: b"pieces", "tf_model.h5": b"not needed"}
    script = (
        "from cloze.export.load.source import locate; "
        f"files = locate('tiny/bert', '{COMMIT}').folder.iterdir(); "
        "print(*sorted(file.name for file in files))"
    )
    for offline in ("0", "1"):
        done = python(hub.url, tmp_path, "-c", script, HF_HUB_OFFLINE=offline)
        assert done.stdout.split() == ["config.json", name], done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny/bert", "--revision", "v9"), "cannot load tiny/bert at revision v9 from the hub"),
        (("not a name!",), "cannot load not a name! from the hub"),
    ],
)
def test_what_the_hub_does_not_have_is_one_clear_line(
    hub: FakeHub, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = export(hub.url, tmp_path, *arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"cloze: {message}")
    assert not (tmp_path / "store").exists()


def test_a_hub_that_does_not_answer_is_one_clear_line(tmp_path: Path) -> None:
    done = export("http://127.0.0.1:9", tmp_path, "tiny/bert")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "cloze: cannot load tiny/bert from the hub (and no directory has that name): "
    )
