"""The files around the code repeat nothing and agree with the Makefile."""

import importlib.metadata
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

from tests.conftest import DATA_VARIABLE

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


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


def recipe(target: str) -> list[str]:
    """Return the commands of a target of the Makefile."""
    rule = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert rule, f"the Makefile has no target {target!r} with commands"
    return [line.strip() for line in rule[1].splitlines()]


def test_the_hooks_run_the_commands_of_make_lint() -> None:
    (repository,) = load(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    entries = [hook["entry"].replace(".venv/bin/", "$(BIN)/") for hook in repository["hooks"]]
    assert entries == recipe("lint")


def test_the_workflow_only_calls_the_makefile() -> None:
    jobs = load(".github/workflows/ci.yml")["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert commands == ["make test"]


@pytest.mark.parametrize(
    ("folder", "outcome", "reason"),
    [
        (None, "1 skipped", "set CLOZE_TEST_DATA to the folder of the external test data"),
        ("nowhere", "1 error", "CLOZE_TEST_DATA names no folder: nowhere"),
    ],
    ids=["unset", "wrong"],
)
def test_external_data_is_skipped_only_when_nobody_names_it(
    folder: str | None, outcome: str, reason: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != DATA_VARIABLE}
    if folder:
        environment[DATA_VARIABLE] = folder
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/test_tokenizer.py",
        "-k",
        "test_golden_questions",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert outcome in done.stdout
    assert reason in done.stdout


def test_only_the_ci_script_says_where_external_data_lies() -> None:
    places = [path for path, text in tracked_files() if re.search(r"\bshared\W{1,5}data\b", text)]
    assert places == [".ci/run"]


# A changelog and a recorded measurement name the version of their day. A bundle is published as it
# is.
RECORDS = ("CHANGELOG.md", "constraints.txt", "bench/results/", "model_store/bundles/")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_version_is_written_down_once() -> None:
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
    assert places == [f'pyproject.toml: version = "{VERSION}"']


def test_the_installed_version_is_the_project_s() -> None:
    assert importlib.metadata.version("cloze") == VERSION, "run `make install` again"
