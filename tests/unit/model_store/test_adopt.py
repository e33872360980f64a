"""Bundles of another store: whole, unchanged, under their own name and version."""

import hashlib
from pathlib import Path

import pytest

from cloze.model_store import Store, StoreError
from tests.unit.service.tasks.model import manifest

CONTENT = {"tokenizer.json": b"t", "g.onnx": b"gg", "golden.json": b"[]"}


def staged(folder: Path, content: dict[str, bytes] = CONTENT, **changes: object) -> Path:
    """Write a bundle, with files and a folder that its manifest does not list."""
    files = {
        n: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in content.items()
    }
    bundle = folder / "downloaded"
    (bundle / "cache").mkdir(parents=True)
    (bundle / "cache/x").write_text("x")
    (bundle / "notes.txt").write_text("x")
    for name, data in content.items():
        (bundle / name).write_bytes(data)
    (bundle / "manifest.json").write_bytes(manifest(files=files, **changes).to_bytes())
    return bundle


def test_a_bundle_keeps_its_name_and_version(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.staging() as folder:
        bundle = store.adopt(staged(folder))
    assert bundle.manifest.reference == "tiny@3"
    assert bundle.path == tmp_path / "tiny/3"
    assert {file.name for file in bundle.path.iterdir()} == {*CONTENT, "manifest.json"}
    assert store.references() == ["tiny@3"]


def test_the_same_bundle_may_come_twice_and_another_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.staging() as folder:
        store.adopt(staged(folder))
    with store.staging() as folder:
        assert store.adopt(staged(folder)).manifest.reference == "tiny@3"
    with (
        store.staging() as folder,
        pytest.raises(StoreError, match="has another tiny@3; remove it"),
    ):
        store.adopt(staged(folder, CONTENT | {"g.onnx": b"other"}))
    assert store.open("tiny").file("g.onnx").read_bytes() == b"gg"


@pytest.mark.parametrize(
    ("file", "data", "problem"),
    [
        ("g.onnx", b"gx", "g.onnx was changed after it was published"),
        ("g.onnx", b"ggg", "g.onnx has 3 bytes, published with 2"),
        ("g.onnx", None, "g.onnx is missing from"),
        ("manifest.json", b"{}", "the manifest of downloaded is refused"),
        ("manifest.json", None, "cannot read the manifest of downloaded: No such file"),
    ],
)
def test_a_bundle_that_was_changed_is_refused(
    tmp_path: Path, file: str, data: bytes | None, problem: str
) -> None:
    store = Store(tmp_path)
    with store.staging() as folder:
        bundle = staged(folder)
        if data is None:
            (bundle / file).unlink()
        else:
            (bundle / file).write_bytes(data)
        with pytest.raises(StoreError, match=problem):
            store.adopt(bundle)
    assert store.references() == []
