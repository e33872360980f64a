"""The benchmark measures peers."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cloze.bench.result import Result as Figures
from cloze.cli import cli
from tests.conftest import minilm_checkpoint


def test_a_peer_that_cannot_be_measured_is_one_line(tiny_store: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = ["bench", "run", "--model", "bert", "--model-store", str(tiny_store)]
    peer = ["--infinity", sys.executable, "--checkpoint", str(tmp_path)]
    done = CliRunner().invoke(cli, [*command, *peer])
    assert done.exit_code == 1
    (line,) = done.stderr.strip().splitlines()
    assert f"infinity-emb needs infinity-emb, which {sys.executable} does not have" in line


@pytest.mark.slow
def test_an_application_around_a_library(minilm_store: Path, tmp_path: Path) -> None:
    peer = f"--sentence-transformers={sys.executable}"
    arguments = ("--model", "minilm", "--model-store", str(minilm_store))
    arguments += ("--texts", "questions", "--texts", "passages")
    short = ("--seconds", "2", "--turns", "1", "--count", "40", "--clients", "1,4", "--no-bulk")
    checkpoint = ("--checkpoint", str(minilm_checkpoint()), "--out", str(tmp_path / "out"))
    command = ["bench", "run", *arguments, *short, "--shares", "0.3", peer, *checkpoint]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    found = Figures.from_json(tmp_path / "out.json")
    assert [load.name for load in found.loads()] == [
        f"{load} {name}"
        for name in ("questions", "passages")
        for load in ("closed 1", "closed 4", "poisson 0.3")
    ]
    theirs = [t for t in found.turns if t.subject == "FastAPI + sentence-transformers torch"]
    assert len(theirs) == 6
    assert all(turn.answered and not turn.failed for turn in theirs)
    assert all(turn.client_cpu_ms > 0 for turn in theirs)
