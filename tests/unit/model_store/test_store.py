"""The store: publish all or nothing, open only what was published, versions, two publishers at
once.
"""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloze.model_store import Manifest, Store, StoreError
from cloze.model_store.locations import SHIPPED_ROOT
from cloze.model_store.manifest import BundleSpec, parse_reference

SPEC = BundleSpec.model_validate(
    {
        "name": "tiny",
        "tasks": ["embed"],
        "architecture": {
            "family": "bert", "vocab_size": 10, "hidden_size": 4, "layers": 1, "heads": 1, "intermediate_size": 8, "max_positions": 16,
            "type_vocab_size": 2, "activation": "gelu", "layer_norm_eps": 1e-12, "parameters": 100,
        },
        "source": {"kind": "directory", "location": "x", "revision": None, "weights_sha256": "0" * 64},
        "license": "apache-2.0",
        "tokenizer": {"file": "t.json", "vocab_size": 10, "lowercase": True, "cls_id": 1, "sep_id": 2, "mask_id": None, "mask_token": None},
        "limits": {"max_tokens": 16},
        "embedding": {"dimensions": 4, "pooling": "mean", "normalize": True, "max_tokens": 16, "prompts": {"q": "query: "}},
        "graph": {"file": "g.onnx", "layout": "dense", "precision": "fp32", "opset": 20, "operators": {"MatMul": 6}},
        "parity": {"tolerance": 1e-4, "batches": [1], "lengths": [3], "max_error": {"embeddings": 1e-6}, "golden_file": "golden.json"},
    }
)  # fmt: skip


def publish(
    root: Path, name: str = "tiny", payload: bytes = b"weights", pause_s: float = 0.0
) -> Manifest:
    store = Store(root)
    with store.staging() as folder:
        for file in ("t.json", "g.onnx", "golden.json"):
            (folder / file).write_bytes(payload)
            time.sleep(pause_s)
        return store.publish(folder, SPEC.model_copy(update={"name": name})).manifest


def test_versions_count_up_and_resolve(tmp_path: Path) -> None:
    assert [publish(tmp_path, payload=bytes([n])).version for n in range(3)] == [1, 2, 3]
    store = Store(tmp_path)
    assert store.open("tiny").manifest.version == 3
    assert store.open("tiny@2").manifest.version == 2
    assert store.open("tiny@2").file("g.onnx").read_bytes() == b"\x01"
    store.remove("tiny@3")
    assert store.open("tiny").manifest.version == 2
    assert publish(tmp_path).version == 3
    store.remove("tiny")
    assert store.references() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("other", "no bundle named 'other'"),
        ("tiny@9", r"has no version 9 \(available: 1\)"),
        ("tiny@0", "not a version"),
        ("tiny@x", "not a version"),
        ("../tiny", "not a bundle name"),
        ("", "not a bundle name"),
        ("tiny\n", "not a bundle name"),
        (".staging", "not a bundle name"),
    ],
)
def test_a_reference_to_nothing_is_one_clear_line(
    tmp_path: Path, reference: str, message: str
) -> None:
    publish(tmp_path)
    with pytest.raises(StoreError, match=message):
        Store(tmp_path).open(reference)


def test_an_empty_or_missing_store_is_empty(tmp_path: Path) -> None:
    assert Store(tmp_path / "missing").references() == []
    with pytest.raises(StoreError, match="cloze export"):
        Store(tmp_path / "missing").open("tiny")


def test_any_flipped_byte_is_refused(tmp_path: Path) -> None:
    published = publish(tmp_path)
    folder = tmp_path / "tiny" / "1"
    rng = random.Random(0)
    for file in folder.iterdir():
        data = file.read_bytes()
        places = range(len(data)) if len(data) < 100 else rng.sample(range(len(data)), 300)
        for place in places:
            flipped = bytearray(data)
            flipped[place] ^= 1 << rng.randrange(8)
            file.write_bytes(flipped)
            with pytest.raises(StoreError):
                Store(tmp_path).open("tiny")
        file.write_bytes(data)
    assert Store(tmp_path).open("tiny").manifest == published


def test_missing_linked_and_longer_files_are_refused(tmp_path: Path) -> None:
    publish(tmp_path)
    file = tmp_path / "tiny" / "1" / "g.onnx"
    file.write_bytes(b"weights and more")
    with pytest.raises(StoreError, match="16 bytes, published with 7"):
        Store(tmp_path).open("tiny")
    file.unlink()
    with pytest.raises(StoreError, match="missing"):
        Store(tmp_path).open("tiny")
    (tmp_path / "elsewhere").write_bytes(b"weights")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="missing"):
        Store(tmp_path).open("tiny")


def test_whatever_else_lies_on_the_volume_is_left_alone(tmp_path: Path) -> None:
    publish(tmp_path)
    (tmp_path / "lost+found").mkdir(mode=0o000)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for odd in ("\u00b2", "01", "x", "-1"):
        (tmp_path / "tiny" / odd).mkdir()
    assert Store(tmp_path).references() == ["tiny@1"]


@pytest.mark.parametrize(
    ("closed", "command"),
    [
        ("tiny/1/g.onnx", "store verify"),
        ("tiny/1/manifest.json", "store list"),
        ("tiny/1", "store list"),
        ("tiny", "store list"),
        (".", "store list"),
        (".", "store verify"),
        (".", "doctor"),
        ("tiny/1/manifest.json", "doctor"),
        (".", "serve --port 0"),
        ("tiny", "serve --port 0 --model tiny"),
        ("..", "serve --port 0"),
    ],
)
def test_what_may_not_be_read_is_said_with_the_user_and_the_path(closed: str, command: str) -> None:
    """As another user, where the tests run as root."""
    with TemporaryDirectory() as folder:  # pytest's are only for root
        root = Path(folder) / "folder" / "store"
        publish(root)
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)
        (root / "lost+found").mkdir(mode=0o700)
        shut = (root / closed).resolve()
        shut.chmod(0)
        try:
            done = run_as_another_user([*command.split(), "--model-store", str(root)])
        finally:
            shut.chmod(0o755)
    said = done.stdout + done.stderr
    assert done.returncode in (1, 2), said
    assert f"Permission denied for user {os.geteuid() or 65534}: {shut}" in said
    assert "Traceback" not in said
    assert "no bundle" not in said


def run_as_another_user(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    code = f"""
import os
import onnxruntime, cloze.service.server.process, cloze.service.engine.session
from cloze.cli import main
if os.geteuid() == 0:
    os.setuid(65534)
main({arguments!r})
"""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
    )


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with (
        pytest.raises(StoreError, match=r"cannot write to the model store .*: No space left"),
        store.staging(),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_moved_folder_is_refused(tmp_path: Path) -> None:
    publish(tmp_path)
    shutil.copytree(tmp_path / "tiny", tmp_path / "renamed")
    with pytest.raises(StoreError, match="published as tiny@1"):
        Store(tmp_path).open("renamed")


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path) -> None:
    publish(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    store = Store(tmp_path)
    with pytest.raises(RuntimeError, match="disk"), store.staging() as folder:
        (folder / "g.onnx").write_bytes(b"half")
        raise RuntimeError("disk")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_store_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StoreError, match="cannot write to the model store"),
        Store(tmp_path / "file").staging(),
    ):
        pass


PUBLISHER = """
import sys
from pathlib import Path
from tests.unit.model_store.test_store import publish
print("go", flush=True)
while True:
    publish(Path(sys.argv[1]), payload=b"x" * 200_000, pause_s=0.001)
"""


def test_killed_publishers_leave_only_whole_bundles(tmp_path: Path) -> None:
    """SIGKILL at random moments: every version that is visible opens, and they are without gaps."""
    rng = random.Random(0)
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, str(tmp_path)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )
        assert process.stdout is not None
        with process.stdout as output:
            assert output.readline() == b"go\n"
            time.sleep(rng.uniform(0.02, 0.2))
            process.send_signal(signal.SIGKILL)
            process.wait()
    store = Store(tmp_path)
    versions = [store.manifest(reference).version for reference in store.references()]
    assert versions == list(range(1, len(versions) + 1))
    assert versions
    for version in versions:
        store.open(f"tiny@{version}")
    # A day later, the next publish clears away what the killed ones left.
    for folder in tmp_path.glob(".staging-*"):
        os.utime(folder, (0, 0))
    publish(tmp_path)
    assert not list(tmp_path.glob(".staging-*"))


def _publish_some(root: Path, payload: bytes) -> None:
    for _ in range(5):
        publish(root, payload=payload)


def test_two_publishers_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_publish_some, args=(tmp_path, bytes([n]) * 50_000))
        for n in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    store = Store(tmp_path)
    payloads = [
        store.open(reference).file("g.onnx").read_bytes()[:1] for reference in store.references()
    ]
    assert sorted(payloads) == sorted(bytes([n]) for n in range(3) for _ in range(5))


# ---- the manifest --------------------------------------------------------------------------------------------------

names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,20}\Z")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=names,
    version=st.integers(1, 10**6),
    license_name=st.none() | texts,
    prompts=st.dictionaries(texts, texts, max_size=3),
)
def test_a_manifest_comes_back_as_it_was_written(
    name: str, version: int, license_name: str | None, prompts: dict[str, str]
) -> None:
    data = SPEC.model_dump(mode="json") | {
        "name": name,
        "version": version,
        "license": license_name,
        "created": "2026-01-02T03:04:05Z",
    }
    data["embedding"]["prompts"] = prompts
    data["files"] = {
        file: {"sha256": "a" * 64, "size": 1} for file in ("t.json", "g.onnx", "golden.json")
    }
    manifest = Manifest.model_validate(data)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert parse_reference(manifest.reference) == (name, version)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {"../evil": {"sha256": "a" * 64, "size": 1}}}, "plain name"),
        ({"files": {"a/b": {"sha256": "a" * 64, "size": 1}}}, "plain name"),
        ({"files": {}}, "not listed"),
        ({"tasks": ["fill-mask", "embed"]}, "mask token"),
        ({"tasks": ["nsp"]}, "come together"),
        ({"name": "../up"}, "name"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_manifest_that_promises_nonsense_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    good = json.loads(publish(tmp_path).model_dump_json())
    Manifest.model_validate(good)
    with pytest.raises(ValueError, match=message):
        Manifest.model_validate(good | change)


@pytest.mark.parametrize("section", [None, "int8", "fp16"])
@pytest.mark.parametrize("kind", ["graph", "golden_file"])
def test_every_graph_and_its_golden_outputs_are_listed_and_limited(
    section: str | None, kind: str
) -> None:
    body = json.loads((SHIPPED_ROOT / "cloze-bert/1/manifest.json").read_bytes())
    del body["digest"]
    own = body[section] if section else body
    file = own["graph"]["file"] if kind == "graph" else own["parity"]["golden_file"]
    large = {file: body["files"][file] | {"size": 2**34}}
    with pytest.raises(ValueError, match=f"'{file}' has {2**34} bytes; the limit is"):
        Manifest.model_validate_json(json.dumps(body | {"files": body["files"] | large}))
    del body["files"][file]
    with pytest.raises(ValueError, match=f"'{file}' is named but not listed under files"):
        Manifest.model_validate_json(json.dumps(body))


def test_another_schema_version_says_so(tmp_path: Path) -> None:
    publish(tmp_path)
    file = tmp_path / "tiny" / "1" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 2}))
    with pytest.raises(StoreError, match="schema_version is 2; this release reads 1"):
        Store(tmp_path).open("tiny")
