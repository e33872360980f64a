"""A start opens models, limits and memory, or nothing; what fails leaves nothing behind."""

import errno
import gc
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Bundle, Store
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.manifest import Precision
from cloze.service.core import Device, Engine, RequestedPrecision
from cloze.service.engine.graph_choice import least_weight_bytes
from cloze.service.errors import StartupError
from cloze.service.models import served_models
from cloze.service.models.served_models import (
    LocalModels,
    check_memory,
    close_models,
    onnx_engine,
    open_bundles,
)
from cloze.service.processes.supervisor import supervise
from cloze.service.server.startup import memory_problem, open_early
from cloze.service.service import single_process
from cloze.service.settings import Settings, load_settings
from tests.support.command import call
from tests.support.fake_engine import FakeEngine
from tests.support.serving import bare_environment
from tests.support.waiting import wait_until


def test_early_engines_are_used_once(
    tiny_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Store(tiny_store).open("bert")
    settings = load_settings({"model_store": tiny_store, "device": "cpu", "precision": "fp32"})
    made: list[Engine] = []
    original = onnx_engine(settings)

    def make(*arguments: Any) -> Engine:
        made.append(original(*arguments))
        return made[-1]

    engines = open_early(settings, [bundle], make)
    assert len(made) == 1
    for number in range(2):
        assert engines(bundle, Device.CPU, Precision.FP32) is made[number], "a reload opens another"
    with pytest.raises(StartupError, match="bundle bert@1: its graph does not load"):
        open_early(settings, [Bundle(bundle.manifest, tmp_path)], make)
    monkeypatch.setattr(served_models, "memory_limit", lambda: 10_000_000)
    with pytest.raises(StartupError, match="the memory limit of this process is 10 MB"):
        open_early(settings, [bundle], make)
    assert len(made) == 2


class LittleMemory(FakeEngine):
    """Runs small batches only."""

    supports_varlen = True
    adapters = None

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        if len(batch) > 2:
            raise RuntimeError("out of memory")
        return super().run(batch, alone=alone)


@pytest.mark.parametrize("fails", ["to open", "to run its largest batch"])
def test_if_the_second_fails_the_first_one_ends(tiny_store: Path, fails: str) -> None:
    made: list[weakref.ref[FakeEngine]] = []

    def make(bundle: Bundle, _device: Device, _precision: RequestedPrecision) -> Engine:
        if not made:
            engine = FakeEngine()
        elif fails == "to open":
            raise StartupError(f"{bundle.manifest.reference} does not open")
        else:
            engine = LittleMemory()
        made.append(weakref.ref(engine))
        return engine

    store = Store(tiny_store)
    settings = Settings(model_store=tiny_store, max_batch_tokens=4096)
    models = LocalModels(settings, make)
    before = set(threading.enumerate())
    with pytest.raises(StartupError, match="bert-qa@1"):
        models.open([store.open("bert"), store.open("bert-qa")])
    wait_until(lambda: set(threading.enumerate()) <= before)
    gc.collect()
    assert made[0]() is None


def test_a_bundle_that_is_named_twice_has_one_engine(tiny_store: Path) -> None:
    made: list[str] = []

    def make(bundle: Bundle, _device: Device, _precision: RequestedPrecision) -> Engine:
        made.append(bundle.manifest.reference)
        return FakeEngine()

    names = "bert, bert-qa@1, bert@1, bert, bert-qa"
    settings = load_settings({"model_store": tiny_store, "model": names})
    models = LocalModels(settings, make).open(open_bundles(settings).bundles)
    close_models(models)
    assert [model.bundle.manifest.reference for model in models] == ["bert@1", "bert-qa@1"]
    assert made == ["bert@1", "bert-qa@1"]


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


def test_models_that_cannot_fit_are_named(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Store(tiny_store).open("bert")
    weights = (Path(tiny_store) / "bert" / "1" / "weights.bin").stat().st_size
    for limit in (None, 70_000_000 + weights):
        monkeypatch.setattr(served_models, "memory_limit", lambda limit=limit: limit)
        check_memory([bundle], Settings())
    monkeypatch.setattr(served_models, "memory_limit", lambda: 69_000_000 + weights)
    with pytest.raises(StartupError) as raised:
        check_memory([bundle], Settings())
    assert "the memory limit of this process is" in str(raised.value)
    assert "bert@1" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_only_the_weights_of_the_graph_that_runs_count(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    """An int8 graph has a file of its own for the matrices, and the embeddings of the fp32 one."""
    options = ExportOptions(tasks=("fill-mask",), precisions=(Precision.INT8,))
    export(str(checkpoints["bert"]), "bert", Store(tmp_path), options)
    bundle = Store(tmp_path).open("bert")
    fp32, int8 = (
        least_weight_bytes(bundle, Device.CPU, precision)
        for precision in (Precision.FP32, Precision.INT8)
    )
    sizes = {name: file.size for name, file in bundle.manifest.files.items()}
    assert 0.95 * sizes["weights.bin"] < fp32 <= sizes["weights.bin"]
    assert sizes["weights-int8.bin"] < int8 < 0.6 * fp32
    assert least_weight_bytes(bundle, Device.AUTO, Precision.INT8) == int8
    unsupported = least_weight_bytes(bundle, Device.CPU, Precision.FP16)
    assert unsupported == 0, "the engine refuses the precision, and says why"


@pytest.mark.parametrize("kilobytes", [500_000, 800_000])
def test_a_limit_of_the_address_space_ends_with_a_line(tiny_store: Path, kilobytes: int) -> None:
    """Whatever fails first: an allocation of Python's, one of onnxruntime's, or a thread."""
    serve = f"{sys.executable} -m cloze serve --port 0 --workers 8 --model-store {tiny_store}"
    env = bare_environment(PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    limited = call(
        "bash", "-c", f"ulimit -v {kilobytes}; exec {serve}", check=False, env=env, timeout=60
    )
    assert limited.returncode == 2, limited.stderr
    assert "Traceback" not in limited.stderr
    last = limited.stderr.splitlines()[-1]
    assert last.startswith("cloze: there is not enough memory to start (")
    assert "ulimit -v" in last


def test_what_is_no_lack_of_memory_keeps_its_own_error() -> None:
    for error in (ValueError("a"), OSError(errno.ENOENT, "no file"), RuntimeError("a bug")):
        assert memory_problem(error) is None
    for error in (MemoryError(), OSError(errno.ENOMEM, "x"), StartupError("std::bad_alloc")):
        assert "raise the limit of memory" in str(memory_problem(error))
