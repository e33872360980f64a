"""One random checkpoint of each family and head, which all tests of this folder share."""

import copy
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cloze.export.load.checkpoint import load_checkpoint
from tests.support.family_checkpoints import save


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function: family, head -> transformers' network, our checkpoint, its folder."""
    root = tmp_path_factory.mktemp("families")

    @cache
    def made(family: str, head: str = "masked_lm") -> tuple[Any, Any, Path]:
        folder = root / f"{family}-{head}"
        network = save(family, head, folder)
        return network, load_checkpoint(str(folder)), folder

    return made


@pytest.fixture
def copied(built: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Return a function: family, head -> a network and a folder, which the test may change."""

    def made(family: str, head: str = "masked_lm") -> tuple[Any, Path]:
        network, _, folder = built(family, head)
        return copy.deepcopy(network), Path(shutil.copytree(folder, tmp_path / "copy"))

    return made
