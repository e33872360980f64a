"""A package that grows beyond its budget of lines fails the linters."""

import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "line-budgets"


def test_a_package_above_its_budget_is_named(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(SCRIPT, tmp_path / "scripts")
    for package, lines in (("small", 3), ("large", 5)):
        (tmp_path / package / "deep").mkdir(parents=True)
        (tmp_path / package / "deep" / "one.py").write_text("a = 1\n" * lines)
        (tmp_path / package / "notes.txt").write_text("a\n" * 100)
    (tmp_path / "pyproject.toml").write_text("[tool.cloze.lines]\nsmall = 3\nlarge = 4\n")
    (tmp_path / "large" / "untracked.py").write_text("a = 1\n" * 100)
    for command in (("init", "-q"), ("add", "small", "large/deep")):
        subprocess.run(("git", *command), cwd=tmp_path, check=True)
    done = subprocess.run((sys.executable, script), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout.split("\n")[:2] == [
        "small              3 of       3 lines",
        "large              5 of       4 lines",
    ]
    assert done.stderr == "large has 1 lines more than its budget\n"
    (tmp_path / "pyproject.toml").write_text("[tool.cloze.lines]\nsmall = 3\nlarge = 5\n")
    done = subprocess.run((sys.executable, script), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
