"""The store: publish all or nothing, open only what was published, two publishers at once."""

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

from cloze.model_store import Manifest, Store, StoreError
from cloze.model_store.manifest import BundleSpec
from tests.support.task_model import manifest

FIELDS = manifest().model_dump(mode="json")
SPEC = BundleSpec.model_validate({name: FIELDS[name] for name in BundleSpec.model_fields})


def publish(
    root: Path, name: str = "tiny", payload: bytes = b"weights", pause_s: float = 0.0
) -> Manifest:
    store = Store(root)
    with store.staging() as folder:
        for file in ("tokenizer.json", "g.onnx", "golden.json"):
            (folder / file).write_bytes(payload)
            time.sleep(pause_s)
        return store.publish(folder, SPEC.model_copy(update={"name": name})).manifest


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


@pytest.mark.parametrize(
    ("closed", "command"),
    [
        ("tiny/1/g.onnx", "store verify"),
        (".", "store list"),
        ("tiny", "serve --port 0 --model tiny"),
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


def test_a_moved_folder_is_refused(tmp_path: Path) -> None:
    publish(tmp_path)
    shutil.copytree(tmp_path / "tiny", tmp_path / "renamed")
    with pytest.raises(StoreError, match="published as tiny@1"):
        Store(tmp_path).open("renamed")


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
