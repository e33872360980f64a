"""What a text costs an engine process beside the graph: to be read, queued, batched, packed, unpacked, sent.

    python bench/engine_cost.py

One thread does all of it in turn; times are of its processor time, so that they hardly depend on what else runs. They leave out
the sockets, the copies to and from the device and what threads cost each other: an engine process carries fewer texts a second
than they allow, whatever its device could.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from model_store import Store
from model_store import interface as names
from model_store.locations import DEFAULT_ROOT
from model_store.manifest import Layout
from service.core import Answer, Device, Output, Query
from service.engine.feeds import BatchFeeds, unpack
from service.processes import frames
from service.scheduler import Scheduler

REQUESTS, TEXTS, ROUNDS = 200, 32, 5
LENGTHS = (12, 31, 174)
"""Tokens: of a search question, of a mix of texts, of a question with its paragraph."""

DIMENSIONS = 768


class Instant:
    """An engine that packs and unpacks, and computes nothing between."""

    device = Device.CUDA
    precision = "fp16"
    reason = "it computes nothing"
    mixes_lengths = True

    def __init__(self) -> None:
        self._feeds = BatchFeeds(Store(DEFAULT_ROOT).open("cloze-bert").manifest, Layout.PACKED)
        self._rows = np.ones((8192, DIMENSIONS), np.float32)

    def run(self, batch: Sequence[Query]) -> list[Output]:
        """See `Engine`."""
        self._feeds.pack(batch)
        return unpack(batch, {names.EMBEDDINGS: self._rows[: len(batch)]})

    def probe(self) -> None:
        """See `Engine`."""


def microseconds(length: int) -> float:
    """Of a text of so many tokens, the least of all rounds."""
    rng = np.random.default_rng(0)
    queries = [Query(rng.integers(5, 900, length, dtype=np.int32), np.zeros(length, np.int32), embed=True) for _ in range(TEXTS)]
    message = frames.encode_run(frames.Run(1, float("inf"), 0, False, queries))
    scheduler = Scheduler(Instant(), workers=0, max_batch_tokens=8192, max_queue_tokens=2**31, stall_timeout_s=60)

    def send(ended: Future[Answer]) -> None:
        frames.encode_done(1, ended.result())

    def play() -> float:
        began = time.thread_time()
        for _ in range(REQUESTS):
            run = frames.decode_run(message)
            scheduler.submit(run.queries, run.deadline).add_done_callback(send)
        while scheduler.queued_tokens:
            scheduler._run(0, scheduler._take_now())
        return time.thread_time() - began

    best = min(play() for _ in range(ROUNDS))
    scheduler.close()
    return best / (REQUESTS * TEXTS) * 1e6


if __name__ == "__main__":
    for length in LENGTHS:
        cost = microseconds(length)
        print(f"{length} tokens: {cost:.1f} us a text, so {1e6 / cost:,.0f} texts/s at most in one engine process")
