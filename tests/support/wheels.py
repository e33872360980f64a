"""Builds wheels of the project."""

import shutil
import subprocess
import sys
from pathlib import Path

NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def build(source: Path, folder: Path) -> Path:
    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    pip("wheel", *offline, "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built
