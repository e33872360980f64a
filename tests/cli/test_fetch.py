"""`cloze fetch`: a model from a hub, an object store or an archive, once, checked, all or nothing."""

import hashlib
import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import zstandard
from click.testing import Result

from cloze import archives
from cloze.model_store import Store
from tests.support.command import cloze, cloze_here
from tests.support.fake_hub import COMMIT, FakeHub, running_hub
from tests.support.object_store import ObjectStore, running_object_store
from tests.support.serving import running_server


@pytest.fixture
def hub(checkpoints: dict[str, Path]) -> Iterator[FakeHub]:
    with running_hub(checkpoints["bert"]) as hub:
        yield hub


@pytest.fixture
def objects() -> Iterator[ObjectStore]:
    with running_object_store() as store:
        yield store


@pytest.fixture
def bundle(tiny_store: Path) -> Path:
    return tiny_store / "bert/1"


def fetch(store: Path, *arguments: str, **environment: str) -> Result:
    return cloze_here("fetch", *arguments, "--model-store", str(store), **environment)


def fetch_apart(
    store: Path, *arguments: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Fetch in a process of its own, which reads all variables."""
    home = {"HOME": str(store.parent)}
    return cloze("fetch", *arguments, "--model-store", str(store), **home, **environment)


def archive_of(folder: Path, inside: str = "") -> bytes:
    """Return a .tar.gz of the files of a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, arcname=inside or ".")
    return buffer.getvalue()


def archive_with(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def assert_nothing_is_left(store: Path) -> None:
    assert not store.exists() or {file.name for file in store.iterdir()} <= {".lock"}


def last_line(done: Result) -> str:
    assert done.exit_code == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_an_archive_is_fetched_once_and_served_from_the_store(
    objects: ObjectStore, bundle: Path, tmp_path: Path
) -> None:
    data = archive_of(bundle, "my-model/bert/1")
    objects.objects["/my-model.tar.gz"] = data
    address = f"{objects.url}/my-model.tar.gz#sha256={hashlib.sha256(data).hexdigest()}"
    store = tmp_path / "store"
    first = fetch(store, address)
    assert first.stdout == "bert@1\n", first.stderr
    assert Store(store).open("bert@1").manifest == Store(bundle.parents[1]).manifest("bert@1")
    asked = len(objects.asked)
    second = fetch(store, CLOZE_MODEL=address)
    assert (second.stdout, second.stderr) == ("bert@1\n", "")
    # The server has no export side: it must find the bundle, and ask nobody.
    with running_server(store, "--model", address) as server:
        answer = httpx.post(f"{server.url}/embed", json={"inputs": "a"})
        assert answer.headers["x-model"] == "bert@1"
    assert len(objects.asked) == asked
    assert not list(store.glob(".staging-*"))


def test_with_a_hash_a_new_signature_fetches_nothing(
    objects: ObjectStore, bundle: Path, tmp_path: Path
) -> None:
    data = archive_of(bundle, "bert/1")
    objects.objects["/bert.tgz"] = data
    address, digest = f"{objects.url}/bert.tgz?signature=", hashlib.sha256(data).hexdigest()
    store = tmp_path / "store"
    assert fetch(store, f"{address}1#sha256={digest}").exit_code == 0
    asked = len(objects.asked)
    assert fetch(store, f"{address}2#sha256={digest}").stdout == "bert@1\n"
    assert len(objects.asked) == asked
    assert fetch(store, f"{address}2").exit_code == 0
    assert len(objects.asked) > asked


@pytest.mark.parametrize("kind", ["bundle", "checkpoint"])
def test_a_folder_of_an_object_store_is_fetched_once(
    objects: ObjectStore, bundle: Path, checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    folder = bundle if kind == "bundle" else checkpoints["bert"]
    for file in folder.iterdir():
        objects.objects[f"/bucket/models/mine/{file.name}"] = file.read_bytes()
    objects.objects["/bucket/models/mine-too/config.json"] = b"of another model"
    listed = "find . -type f -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    digest = subprocess.check_output(["sh", "-c", listed], cwd=folder, text=True).split()[0]
    store, model = tmp_path / "store", "s3://bucket/models/mine"
    done = fetch(store, model, "--sha256", digest, **objects.s3)
    expected = "bert@1" if kind == "bundle" else "mine@1"
    assert done.stdout == f"{expected}\n", done.stderr
    asked = len(objects.asked)
    again = fetch(store, f"{model}#sha256={digest}", **objects.s3)
    assert (again.stdout, again.stderr) == (f"{expected}\n", "")
    assert len(objects.asked) == asked
    other = last_line(fetch(store, f"{model}#sha256={'0' * 64}", **objects.s3))
    assert f"its sha256 is {digest}, but {'0' * 64} was asked for" in other


def test_the_folder_of_a_bundle_is_copied_once(bundle: Path, tmp_path: Path) -> None:
    assert fetch(tmp_path / "by-fsspec", f"file://{bundle}").stdout == "bert@1\n"
    store, source = tmp_path / "store", Path(shutil.copytree(bundle, tmp_path / "mine"))
    done = fetch(store, str(source))
    assert done.stdout == "bert@1\n", done.stderr
    assert done.stderr == f"copied the bundle {source} as bert@1\n"
    assert (source / "manifest.json").exists()
    again = fetch(store, str(source))
    assert (again.stdout, again.stderr) == ("bert@1\n", "")
    (source / "tokenizer.json").write_text("{}")
    refused = last_line(fetch(tmp_path / "other", str(source)))
    assert refused.startswith(f"cloze: model {source}: bundle bert@1: tokenizer.json has 2 bytes, ")
    assert_nothing_is_left(tmp_path / "other")


def test_a_repository_is_fetched_once(hub: FakeHub, tmp_path: Path) -> None:
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "CLOZE_MODEL": f"hub:tiny/bert@{COMMIT}",
    }
    store = tmp_path / "store"
    assert fetch_apart(store, **environment).stdout == "bert@1\n"
    assert Store(store).manifest("bert").source.revision == COMMIT
    asked = len(hub.asked)
    shutil.rmtree(tmp_path / "hub")
    assert fetch_apart(store, **environment).stdout == "bert@1\n"
    assert len(hub.asked) == asked


def test_another_hash_leaves_nothing(objects: ObjectStore, bundle: Path, tmp_path: Path) -> None:
    objects.objects["/m.tar.gz"] = data = archive_of(bundle)
    done = fetch(tmp_path / "store", f"{objects.url}/m.tar.gz", "--sha256", "0" * 64)
    actual = hashlib.sha256(data).hexdigest()
    assert last_line(done) == (
        f"cloze: model {objects.url}/m.tar.gz: its sha256 is {actual}, but {'0' * 64} was asked for"
    )
    assert_nothing_is_left(tmp_path / "store")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/folder", "an address of http must be that of an archive (.tar.gz, .tgz, .tar.zst)"),
        ("/empty.tar.gz", "it has neither a bundle (manifest.json) nor a checkpoint"),
        ("/noise.tar.zst", "the archive is damaged: "),
        ("/two.tar.gz", "it has 2 bundles; an address names one model"),
        ("/changed.tar.gz", "bundle bert@1: "),
        ("/missing.tar.gz", "cannot be read: HTTP Error 404: Not Found"),
        ("/cut.tar.gz", ""),
    ],
)
def test_what_is_no_model_is_one_line(
    objects: ObjectStore, bundle: Path, tmp_path: Path, path: str, message: str
) -> None:
    changed = Path(shutil.copytree(bundle, tmp_path / "changed"))
    (changed / "tokenizer.json").write_text("{}")
    two = [(tarfile.TarInfo(f"{name}/manifest.json"), b"{}") for name in "ab"]
    objects.objects |= {
        "/empty.tar.gz": archive_with((tarfile.TarInfo("a/readme"), b"")),
        "/noise.tar.zst": b"noise",
        "/two.tar.gz": archive_with(*two),
        "/changed.tar.gz": archive_of(changed),
        "/cut.tar.gz": archive_of(bundle),
    }
    objects.truncates = path == "/cut.tar.gz"
    line = last_line(fetch(tmp_path / "store", objects.url + path))
    assert line.startswith(f"cloze: model {objects.url}{path}: {message}"), line
    assert_nothing_is_left(tmp_path / "store")


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "info",
    [
        member("../../escaped"),
        member("/tmp/escaped"),
        member("link", tarfile.SYMTYPE, "/etc"),
        member("link", tarfile.LNKTYPE, "config.json"),
        member("pipe", tarfile.FIFOTYPE),
        member("config.json"),
        member("config.json/x"),
    ],
    ids=lambda info: info.name,
)
def test_an_archive_cannot_write_elsewhere(tmp_path: Path, info: tarfile.TarInfo) -> None:
    archive, folder = tmp_path / "a.tar.gz", tmp_path / "inside/folder"
    archive.write_bytes(archive_with((member("config.json"), b"{}"), (info, b"")))
    folder.mkdir(parents=True)
    with pytest.raises(archives.ExportError, match=r"leads out|neither a file|there twice"):
        archives.unpack(archive, ".tar.gz", folder)
    written = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert written == ["a.tar.gz", "config.json"]


def test_an_archive_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(archive_with((member("a"), b"0" * 600), (member("b"), b"0" * 600)))
    for name, limit, message in (
        ("_MAX_BYTES", 1000, "more than 1000 bytes"),
        ("_MAX_MEMBERS", 1, "more than 1 members"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(archives, name, limit)
            folder = tmp_path / name
            folder.mkdir()
            with pytest.raises(archives.ExportError, match=message):
                archives.unpack(archive, ".tar.gz", folder)


def test_two_processes_add_one_checkpoint_once(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """As two pods do that share a volume."""
    store = tmp_path / "store"
    with ThreadPoolExecutor(2) as pool:
        done = [*pool.map(lambda _: fetch_apart(store, str(checkpoints["bert"])), range(2))]
    assert [each.returncode for each in done] == [0, 0], done
    assert {each.stdout.strip() for each in done} == set(Store(store).references())
    assert sum("waits until another process" in each.stderr for each in done) == 1


def test_a_compressed_checkpoint_is_exported(
    objects: ObjectStore, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(checkpoints["bert"], arcname="checkpoint")
    data = zstandard.compress(buffer.getvalue())
    objects.objects["/my model.tar.zst"] = data
    done = fetch(tmp_path / "store", f"{objects.url}/my%20model.tar.zst?signature=s3cret")
    assert done.stdout == "my-20model@1\n", done.stderr
    assert hashlib.sha256(data).hexdigest() in done.stderr
    assert "s3cret" not in done.stderr
    assert "fill-mask" in Store(tmp_path / "store").open("my-20model").manifest.tasks
