"""Models that open together: if one of them fails, nothing of the others stays."""

import gc
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest

from cloze.model_store import Bundle, Store
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.service.core import Device, Engine, RequestedPrecision, StartupError
from cloze.service.served_models import LocalModels
from cloze.service.settings import Settings
from tests.fake_engine import FakeEngine
from tests.waiting import wait_until


class LittleMemory(FakeEngine):
    """Runs small batches only."""

    supports_varlen = True

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
