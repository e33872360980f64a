"""Models that open together: if one of them fails, nothing of the others stays."""

import gc
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cloze.model_store import Bundle, Store
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.manifest import Precision
from cloze.service.core import Device, Engine, RequestedPrecision
from cloze.service.errors import StartupError
from cloze.service.models import served_models
from cloze.service.models.served_models import LocalModels, close_models, onnx_engine, open_bundles
from cloze.service.server.startup import open_early
from cloze.service.settings import Settings, load_settings
from tests.support.fake_engine import FakeEngine
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
