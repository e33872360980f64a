"""The files around the code repeat nothing and agree with the Makefile."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import named_folder
from tests.support.documents import DOCUMENTS

ROOT = Path(__file__).parents[2]


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def tracked_files() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every file that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: the project's own files cannot be told from others")
    for path in listed.stdout.splitlines():
        if (ROOT / path).is_file():
            yield path, (ROOT / path).read_text(errors="replace")


def test_the_hooks_run_the_commands_of_make_lint() -> None:
    rule = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert rule
    (repository,) = load(".pre-commit-config.yaml")["repos"]
    entries = [hook["entry"].replace(".venv/bin/", "$(BIN)/") for hook in repository["hooks"]]
    assert entries == [line.strip() for line in rule[1].splitlines()]


@pytest.mark.parametrize(
    ("workflow", "command"),
    [("ci", "make test"), ("audit", "make audit-dependencies"), ("release", "make wheel")],
)
def test_a_workflow_only_calls_the_makefile(workflow: str, command: str) -> None:
    jobs = load(f".github/workflows/{workflow}.yml")["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert commands == [command]


def test_external_data_is_skipped_only_when_nobody_names_it() -> None:
    with pytest.raises(pytest.skip.Exception, match="set CLOZE_TEST_DATA to the folder of"):
        named_folder(None)
    with pytest.raises(pytest.fail.Exception, match="CLOZE_TEST_DATA names no folder: nowhere"):
        named_folder("nowhere")
    assert named_folder(str(ROOT)) == ROOT


# A changelog and a recorded measurement name the version of their day. A bundle is published as it
# is.
RECORDS = ("CHANGELOG.md", "constraints.txt", "bench/results/", "model_store/bundles/")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_no_document_installs_what_no_index_has() -> None:
    """Until a release is on an index, each command names a checkout, a wheel or a repository."""
    commands = [
        f"{document.name}: {line.strip()}"
        for document in DOCUMENTS
        for line in document.read_text().splitlines()
        if "pip install" in line and "cloze-server" in line
    ]
    assert [c for c in commands if " @ " not in c and "finds nothing" not in c] == []


@pytest.mark.parametrize("target", ["install", "serve"])
def test_an_older_python_is_refused_in_one_line(target: str, tmp_path: Path) -> None:
    """The older Python is a script, which ends as the check of its version would."""
    older = tmp_path / "python3"
    older.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.13 || exit 1\n')
    older.chmod(0o755)
    folders = [f"VENV={tmp_path}/venv", f"SERVING={tmp_path}/serving"]
    command = ["make", target, f"PYTHON={older}", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    line, *_ = done.stderr.splitlines()
    assert line.startswith(f"Cloze needs Python 3.11 or later; {older} is Python 3.10.13.")
    assert "pip" not in done.stdout + done.stderr


def test_the_version_is_written_down_once_per_distribution() -> None:
    alone = re.compile(
        rf"(?<![\w.=]){re.escape(VERSION)}(?![\w.])"
    )  # not the ==0.1.0 of a requirement
    places = [
        f"{path}: {line.strip()}"
        for path, text in tracked_files()
        if not path.startswith(RECORDS)
        for line in text.splitlines()
        if alone.search(line)
    ]
    files = ("client/pyproject.toml", "pyproject.toml")
    assert places == [f'{file}: version = "{VERSION}"' for file in files]


@pytest.mark.parametrize("git", ["there", "missing"])
def test_a_checkout_says_its_revision(git: str, tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("the sources are no checkout")
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
    revision = head[:12] if git == "there" else "unknown"
    shown = subprocess.run(
        [sys.executable, "-m", "cloze", "--version"],
        env=os.environ if git == "there" else {**os.environ, "PATH": str(tmp_path)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == f"cloze, version {VERSION}, revision {revision}\n"
