"""Folders of a store: versions, adoption, removal, what is left over, and how more is installed."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import pytest

from cloze.model_store import Store, StoreError, installation
from cloze.model_store.installation import install_command
from tests.support.task_model import manifest

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


def kept(root: Path, *versions: int, name: str = "tiny") -> Store:
    """Return a store with some versions of a bundle."""
    one = Store(root)
    for version in versions:
        with one.staging() as folder:
            one.adopt(staged(folder, version=version, name=name))
    return one


def test_the_newest_version_is_meant_unless_one_is_named(tmp_path: Path) -> None:
    one = kept(tmp_path, 2, 10, 9)
    assert one.references() == ["tiny@2", "tiny@9", "tiny@10"]
    assert one.resolve("tiny") == tmp_path / "tiny/10"
    assert one.resolve("tiny@9") == tmp_path / "tiny/9"
    assert one.manifest("tiny").version == 10
    with pytest.raises(StoreError, match=r"'tiny' has no version 3 \(available: 2, 9, 10\)"):
        one.resolve("tiny@3")
    with pytest.raises(StoreError, match=rf"named 'other' in {tmp_path} \(available: tiny\)"):
        one.resolve("other")
    with pytest.raises(StoreError, match="available: none; `cloze export` makes one"):
        Store(tmp_path / "empty").resolve("tiny")
    with pytest.raises(StoreError, match="is not a version"):
        one.resolve("tiny@x")


def test_other_folders_are_no_versions(tmp_path: Path) -> None:
    one = kept(tmp_path, 1)
    for name in ("0", "01", "1x", "1234567890", "x"):
        (tmp_path / "tiny" / name).mkdir()
    (tmp_path / "tiny/2").write_text("a file")
    (tmp_path / "Not a name/1").mkdir(parents=True)
    (tmp_path / "nothing").mkdir()
    assert one.references() == ["tiny@1"]
    (tmp_path / "tiny/123456789").mkdir()
    assert one.resolve("tiny").name == "123456789"


def test_a_default_store_reads_the_package_s_bundles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    kept(shipped, 1, 2)
    kept(shipped, 1, name="other")
    one = kept(own, 2, 3)
    monkeypatch.setattr(one, "_folders", (own, shipped))
    assert one.references() == ["other@1", "tiny@1", "tiny@2", "tiny@3"]
    assert one.resolve("tiny@2") == own / "tiny/2"
    assert one.resolve("tiny@1") == shipped / "tiny/1"
    for reference in ("tiny@1", "other"):
        with pytest.raises(StoreError, match=rf"is not in {own}; a bundle that comes with the"):
            one.remove(reference)
    one.remove("tiny")
    assert one.references() == ["other@1", "tiny@1", "tiny@2"]


def test_a_bundle_keeps_its_name_and_may_come_twice_and_another_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for _ in range(2):
        with store.staging() as folder:
            bundle = store.adopt(staged(folder))
        assert bundle.manifest.reference == "tiny@3"
        assert bundle.path == tmp_path / "tiny/3"
        assert {file.name for file in bundle.path.iterdir()} == {*CONTENT, "manifest.json"}
    assert store.references() == ["tiny@3"]
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


def test_one_version_or_all_are_removed(tmp_path: Path) -> None:
    one = kept(tmp_path, 1, 2, 3)
    one.remove("tiny@2")
    assert one.references() == ["tiny@1", "tiny@3"]
    one.remove("tiny@3")
    assert (tmp_path / "tiny").is_dir()
    one.remove("tiny@1")
    assert list(tmp_path.iterdir()) == []
    one = kept(tmp_path, 1, 2)
    kept(tmp_path, 1, name="other")
    one.remove("tiny")
    assert one.references() == ["other@1"]
    with pytest.raises(StoreError, match="no bundle named 'tiny'"):
        one.remove("tiny")
    one = kept(tmp_path, 1)
    (tmp_path / "tiny/notes").write_text("x")
    one.remove("tiny")
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["notes"], "no bundle's file"


def test_folders_that_are_left_over_for_a_day_are_removed(tmp_path: Path) -> None:
    old, young, other = (tmp_path / name for name in (".staging-a", ".staging-b", "staging"))
    now = time.time()
    for folder, age in ((old, 24 * 3600 + 60), (young, 24 * 3600 - 600), (other, 10**6)):
        folder.mkdir()
        (folder / "x").write_text("x")
        os.utime(folder, (now - age, now - age))
    with Store(tmp_path).staging() as folder:
        assert folder.is_dir()
        assert folder.name.startswith(".staging-")
        assert list(folder.iterdir()) == []
        (folder / "y").write_text("y")
    assert not folder.exists()
    assert (old.exists(), young.exists(), other.exists()) == (False, True, True)


def test_staging_makes_the_store_and_ends_with_an_error(tmp_path: Path) -> None:
    one = Store(tmp_path / "a/b")
    with pytest.raises(KeyError), one.staging() as folder:
        raise KeyError("x")
    assert list((tmp_path / "a/b").iterdir()) == []
    assert not folder.exists()
    with (
        pytest.raises(StoreError, match=r"cannot write to the model store .*a/b: No space left"),
        one.staging(),
    ):
        raise OSError(28, "No space left on device")
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(StoreError, match=r"cannot write to the model store .*file"),
        Store(tmp_path / "file").staging(),
    ):
        pass


@pytest.mark.parametrize(
    ("recorded", "target"),
    [
        (None, "'cloze-server[cpu,export]'"),
        ("https://index/x.whl", "'cloze-server[cpu,export]'"),
        ("file://{}/missing", "'cloze-server[cpu,export]'"),
        ("file://{}/a%20folder", "--editable '{}/a folder[cpu,export]'"),
        ("file://{}/x.whl", "'cloze-server[cpu,export] @ file://{}/x.whl'"),
    ],
)
def test_the_command_that_installs_extras(
    recorded: str | None, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "x.whl").write_text("x")
    url = recorded and json.dumps({"url": recorded.format(tmp_path)})

    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return url

    monkeypatch.setattr(installation, "distribution", lambda _: Installed())
    command = install_command("cpu", "export")
    assert command == f"{sys.executable} -m pip install {target.format(tmp_path)}"
