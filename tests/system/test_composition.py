"""A service starts nothing before `begin`, and a start that fails leaves nothing behind."""

import threading
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from cloze.service.errors import StartupError
from cloze.service.processes.supervisor import supervise
from cloze.service.service import single_process
from cloze.service.settings import Settings, load_settings
from tests.support.fake_engine import FakeEngine


def fake(store: Path, **settings: object) -> Settings:
    return load_settings({"model_store": store, "model": "bert", **settings})


def test_the_limits_of_bodies_are_those_of_the_settings(tiny_store: Path) -> None:
    limits = {"max_request_texts": 1, "max_request_tokens": 1000, "max_request_bytes": 80_000}
    service = single_process(fake(tiny_store, **limits), lambda *_: FakeEngine())
    with TestClient(service, base_url="http://localhost") as client:
        info = client.get("/info").json()
        many = client.post("/embed", content=b'{"inputs": [' + b"1," * 34_000 + b"1]}")
        large = client.post("/embed", content=b" " * 80_001)
    assert (info["max_client_batch_size"], info["max_request_bytes"]) == (1, 80_000)
    assert many.json()["code"] == large.json()["code"] == "body_too_large"


def test_a_start_that_fails_ends_its_engines(tiny_store: Path) -> None:
    before = threading.enumerate()
    with pytest.raises(StartupError, match="there is no task 'poetry'"):
        single_process(fake(tiny_store, default=("poetry=bert",)), lambda *_: FakeEngine())
    assert [thread for thread in threading.enumerate() if thread not in before] == []


def test_an_error_of_the_operator_is_found_before_the_models(tiny_store: Path) -> None:
    opened: list[FakeEngine] = []

    def make(*_: object) -> FakeEngine:
        opened.append(FakeEngine())
        return opened[-1]

    missing = tiny_store / "missing.pem"
    for wrong in (
        {"tls_certificate": missing, "tls_key": missing},
        {"keys_file": tiny_store / "missing.toml"},
    ):
        with pytest.raises(StartupError, match="missing"):
            single_process(fake(tiny_store, **wrong), make)
    assert not opened


def test_a_folder_whose_sockets_cannot_be_named_stops_the_start(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("a" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    settings = load_settings({"model_store": tiny_store, "frontends": 1, "port": 0})
    with pytest.raises(StartupError, match="set TMPDIR to a short path"):
        supervise(settings)
    assert list(deep.iterdir()) == []
