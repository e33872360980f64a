"""Builds wheels of the project."""

import shutil
import sys
from pathlib import Path

from tests.support.command import call

NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")


def pip(*arguments: str) -> None:
    call(sys.executable, "-m", "pip", "--quiet", *arguments)


def build(source: Path, folder: Path) -> Path:
    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    pip("wheel", *offline, "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built
