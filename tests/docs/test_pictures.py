"""The pictures of the page at / in the documents show the page and the models of this tree."""

import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"


def test_the_pictures_of_the_page_are_not_stale() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "draw-page"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pictures_are_small_and_are_not_empty() -> None:
    for picture in IMAGES.glob("*.png"):
        assert picture.stat().st_size < 300_000, picture.name
        colours = Image.open(picture).convert("RGB").getcolors(1 << 20)
        assert colours is None or len(colours) > 20, picture.name
