"""An engine for tests of what stands before it: instant, and steered. It can be held, made to fail, and broken."""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from service.core import Device, Output, Query


class FakeEngine:
    """Embeds a query as the sum of its ids, and remembers the batches it was given.

    Attributes:
        batches: every batch that ran, in order.
        gate: `run` waits while it is cleared.
        entered: set when a run begins to wait or to work.
        poison: queries that make `run` raise.
        broken: whether `probe` fails too.
    """

    device = Device.CPU
    precision = "fp32"
    reason = "it is a fake"
    mixes_lengths = False

    def __init__(self, poison: Callable[[Query], bool] = lambda _: False) -> None:
        self.batches: list[list[Query]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.poison = poison
        self.broken = False

    def run(self, batch: Sequence[Query]) -> list[Output]:
        """As `Engine.run`."""
        self.entered.set()
        self.gate.wait()
        if any(self.poison(query) for query in batch):
            raise RuntimeError("a poisoned query")
        self.batches.append(list(batch))
        return [Output(embedding=np.array([query.input_ids.sum()], np.float32)) for query in batch]

    def probe(self) -> None:
        """As `Engine.probe`."""
        if self.broken:
            raise RuntimeError("the engine is broken")
