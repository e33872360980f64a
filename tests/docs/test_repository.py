"""The files around the code repeat nothing and agree with the Makefile."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.command import call

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


GENERATED = ("route-reference", "command-reference", "make-dashboard", "make-prometheusrule")
SLOW = ("tensor-reference", "family-reference", "draw-page")


@pytest.mark.parametrize(
    "script", [*GENERATED, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_generated_files_are_what_their_script_writes(script: str) -> None:
    """If this fails, run the script, or `make docs`."""
    call(sys.executable, ROOT / "scripts" / script, "--check")


def test_an_older_python_is_refused_in_one_line(tmp_path: Path) -> None:
    """The older Python is a script, which ends as the check of its version would."""
    older = tmp_path / "python3"
    older.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.13 || exit 1\n')
    older.chmod(0o755)
    folders = [f"VENV={tmp_path}/venv", f"SERVING={tmp_path}/serving"]
    command = ["make", "install", f"PYTHON={older}", *folders]
    done = call(*command, check=False, cwd=ROOT)
    assert done.returncode != 0
    line, *_ = done.stderr.splitlines()
    assert line.startswith(f"Cloze needs Python 3.11 or later; {older} is Python 3.10.13.")
    assert "pip" not in done.stdout + done.stderr


@pytest.mark.parametrize("git", ["there", "missing"])
def test_a_checkout_says_its_revision(git: str, tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("the sources are no checkout")
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)
    revision = head[:12] if git == "there" else "unknown"
    shown = call(
        sys.executable,
        "-m",
        "cloze",
        "--version",
        env=os.environ if git == "there" else {**os.environ, "PATH": str(tmp_path)},
        cwd=tmp_path,
    )
    assert shown.stdout == f"cloze, version {VERSION}, revision {revision}\n"
