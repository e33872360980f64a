"""The files around the code repeat nothing and agree with the Makefile."""

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


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


# A changelog and a recorded measurement name the version of their day. A bundle is published as it is.
RECORDS = ("CHANGELOG.md", "constraints.txt", "bench/results/", "model_store/bundles/")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_version_is_written_down_once() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: the project's own files cannot be told from others")
    alone = re.compile(rf"(?<![\w.=]){re.escape(VERSION)}(?![\w.])")  # not the ==0.1.0 of a requirement
    places = [
        f"{path}: {line.strip()}"
        for path in listed.stdout.splitlines()
        if not path.startswith(RECORDS) and (ROOT / path).is_file()
        for line in (ROOT / path).read_text(errors="replace").splitlines()
        if alone.search(line)
    ]
    assert places == [f'pyproject.toml: version = "{VERSION}"']


def test_the_installed_version_is_the_project_s() -> None:
    assert importlib.metadata.version("cloze") == VERSION, "run `make install` again"
