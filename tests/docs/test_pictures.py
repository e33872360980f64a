"""The pictures of the page at / in the documents show the page and the models of this tree."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"

pytestmark = pytest.mark.slow


def test_the_pictures_of_the_page_are_not_stale() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "draw-page"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
