"""An export that equals the newest bundle of its name finds it, and writes nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from cloze.export.publish import ExportOptions
from cloze.export.publish import export as publish
from cloze.model_store import Store
from cloze.model_store.manifest import Weights


@pytest.fixture
def source(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(checkpoints["bert"], tmp_path / "source")


def test_an_equal_export_is_found_once_and_an_older_one_is_not(
    source: Path, tmp_path: Path
) -> None:
    store, said = Store(tmp_path / "store"), []

    def export(**options: Any) -> str:
        done = publish(str(source), "m", store, ExportOptions(**options, reuse=True), said.append)
        return done.manifest.reference

    assert [export(), export()] == ["m@1", "m@1"]
    assert said[-1] == "the store has this export as m@1; nothing is written"
    assert [export(weights=Weights.FP16), export(weights=Weights.FP16)] == ["m@2", "m@2"]
    assert [export(tasks=("embed",)), export(tasks=("embed",))] == ["m@3", "m@3"]
    assert export() == "m@4", "a server serves the newest version, and this was version 1"
    (tmp_path / "store/m/4/weights.bin").write_bytes(b"damaged")
    assert export() == "m@5"
