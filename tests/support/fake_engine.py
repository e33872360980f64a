"""An engine for tests, without a model. A test can block its runs and make the runs fail."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.heads import ArrayResult
from cloze.model_store.heads.embedding import HEAD
from cloze.model_store.manifest import Precision
from cloze.service.batching.admission import SchedulerLimits
from cloze.service.batching.scheduler import Scheduler
from cloze.service.core import Device


class FakeEngine:
    """Returns the sum of an encoding's ids as its embedding, and records every batch.

    `run` sets the event `entered`, and blocks while the event `gate` is cleared. An encoding that
    `poison` selects makes `run` raise.
    """

    device = Device.CPU
    precision = Precision.FP32
    reason = "it is a fake"
    supports_varlen = False
    adapters = None

    def __init__(self, poison: Callable[[Encoding], bool] = lambda _: False) -> None:
        self.batches: list[list[Encoding]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.poison = poison
        self.broken = False

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        """Return the sum of the ids of each encoding; raise if `poison` selects one."""
        self.entered.set()
        self.gate.wait()
        if any(self.poison(encoding) for encoding in batch):
            raise RuntimeError("a poisoned encoding")
        self.batches.append(list(batch))
        sums = [np.array([encoding.input_ids.sum()], np.float32) for encoding in batch]
        return [{HEAD.name: ArrayResult(total)} for total in sums]

    def probe(self) -> None:
        """Raise if the engine is broken."""
        if self.broken:
            raise RuntimeError("the engine is broken")


@contextmanager
def running(engine: Any, limits: SchedulerLimits, **options: Any) -> Iterator[Scheduler]:
    """Run a scheduler on an engine."""
    made = Scheduler(engine, limits, **options)
    made.start()
    try:
        yield made
    finally:
        if isinstance(engine, FakeEngine):
            engine.gate.set()
        made.close()
