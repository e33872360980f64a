"""The files around the code repeat nothing and agree with the Makefile."""

import re
from pathlib import Path
from typing import Any

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
