"""`cloze serve --model` with a directory or a repository: exported once, later from the store."""

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import httpx
import pytest

from cloze import model_sources
from cloze.model_sources import SourceError, bundles_to_serve, parse_address
from cloze.model_store import Store
from cloze.service.settings import Settings
from cloze.source_records import SourceRecord
from tests.support.serving import running_server

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def checkpoint(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints["bert"], tmp_path / "my bert!"))


def resolved(tmp_path: Path, model: str, **options: object) -> tuple[str, list[str]]:
    """Return the bundle of a model, and the progress messages."""
    said: list[str] = []
    settings = Settings(model=(model,), model_store=tmp_path / "store", **options)
    [reference] = bundles_to_serve(settings, said.append)
    return reference, said


def test_a_directory_is_exported_once_and_served(checkpoint: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    model = ("--model", str(checkpoint))
    with running_server(store, *model) as server:
        answer = httpx.post(f"{server.url}/embed", json={"inputs": "a"})
        assert answer.headers["x-model"] == "my-bert@1"
        assert any(line.startswith("exporting ") for line in server.log)
        assert any(line.startswith("  offers fill-mask, score, embed, ") for line in server.log)
        assert not any("is not offered" in line for line in server.log)
    with running_server(store, *model) as server:
        assert not any("export" in line for line in server.log)
        answer = httpx.post(f"{server.url}/embed", json={"inputs": "a", "model": "my-bert"})
        assert answer.headers["x-model"] == "my-bert@1"
    assert Store(store).references() == ["my-bert@1"]


def test_only_other_contents_are_exported_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolved(tmp_path, str(checkpoint))[0] == "my-bert@1"
    for file in checkpoint.iterdir():
        os.utime(file, (1, 1))
    assert resolved(tmp_path, str(checkpoint)) == ("my-bert@1", []), "the same bytes at other times"
    assert resolved(tmp_path, str(checkpoint)) == ("my-bert@1", []), "the times are recorded"
    (checkpoint / "checkpoint-500").mkdir()
    (checkpoint / "checkpoint-500" / "optimizer.pt").write_bytes(b"0" * 1000)
    monkeypatch.chdir(tmp_path)
    assert resolved(tmp_path, "./my bert!") == ("my-bert@1", []), "another path of the same source"
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"note": "changed"}))
    assert resolved(tmp_path, str(checkpoint))[0] == "my-bert@1", "the bundle would be the same"
    (checkpoint / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-3}))
    assert resolved(tmp_path, str(checkpoint))[0] == "my-bert@2"
    Store(tmp_path / "store").remove("my-bert@2")
    assert resolved(tmp_path, str(checkpoint))[0] == "my-bert@2", "the bundle was gone"


def test_int8_is_exported_when_it_is_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    assert resolved(tmp_path, str(checkpoint))[0] == "my-bert@1"
    assert resolved(tmp_path, str(checkpoint), precision="int8")[0] == "my-bert@2"
    assert resolved(tmp_path, str(checkpoint)) == ("my-bert@2", []), "it has fp32 as well"
    assert Store(tmp_path / "store").open("my-bert@2").manifest.int8 is not None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("tiny/bert", "model 'tiny/bert' may be a directory or a repository; write ./tiny/bert or hub:tiny/bert"),
        ("./nothing", "model ./nothing: there is no directory "),
        ("~nobody99/x", "model ~nobody99/x: "),
        ("hub:bert", "model 'hub:bert' is not hub:ORGANISATION/NAME[@REVISION]"),
        ("hub:a/b@main", "model hub:a/b: cannot load a/b at revision main from the hub"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_one_line(tmp_path: Path, model: str, message: str) -> None:
    with pytest.raises(SourceError) as refused:
        resolved(tmp_path, model)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_half_a_model_is_refused_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(SourceError) as refused:
        resolved(tmp_path, str(checkpoint))
    assert "model.safetensors" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert Store(tmp_path / "store").references() == []


def test_a_checkpoint_that_changes_during_its_export_is_exported_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = model_sources._export

    def slow(*arguments: object) -> str:
        reference = export(*arguments)  # type: ignore[arg-type]
        config = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-3}))
        return reference

    monkeypatch.setattr(model_sources, "_export", slow)
    assert resolved(tmp_path, str(checkpoint))[0] == "my-bert@1"
    monkeypatch.undo()
    assert resolved(tmp_path, str(checkpoint))[0] == "my-bert@2"


def test_no_space_is_told_before_the_export(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_sources.shutil, "disk_usage", lambda _: Usage(10, 9, 1 << 10))
    with pytest.raises(SourceError, match=r"may need \d+ MiB, but .* has 0 MiB free"):
        resolved(tmp_path, str(checkpoint))


def test_a_record_has_no_secret_of_an_address(tmp_path: Path) -> None:
    address = parse_address("https://me:password@host/m.tar.gz?signature=secret")
    record = SourceRecord(tmp_path, address.url, None, address.shown)
    record.write("m@1", {}, None, "0" * 64)
    (file,) = (tmp_path / ".sources").iterdir()
    assert "https://host/m.tar.gz" in file.read_text()
    assert "password" not in file.read_text()
    assert "secret" not in file.read_text()
