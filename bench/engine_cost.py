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
from model_store.batch import BatchCodec, Encoding, HeadOutputs
from model_store.heads.embedding import EMBEDDINGS, HEAD, EmbeddingRequest
from model_store.layouts import Layout
from model_store.locations import DEFAULT_ROOT
from model_store.manifest import Precision
from service.batching.scheduler import Scheduler, SchedulerLimits
from service.core import BatchResult, Device
from service.processes import frames

REQUESTS, TEXTS, ROUNDS = 200, 32, 5
LENGTHS = (12, 31, 174)
"""Tokens: of a search question, of a mix of texts, of a question with its paragraph."""

DIMENSIONS = 768


class Instant:
    """An engine that packs and unpacks, and computes nothing between."""

    device = Device.CUDA
    precision = Precision.FP16
    reason = "it computes nothing"
    supports_varlen = True

    def __init__(self) -> None:
        manifest = Store(DEFAULT_ROOT).open("cloze-bert").manifest
        self._codec = BatchCodec(manifest.graph_spec(Layout.PACKED))
        self._rows = np.ones((8192, DIMENSIONS), np.float32)

    def run(self, batch: Sequence[Encoding]) -> list[HeadOutputs]:
        """See `Engine`."""
        self._codec.pack(batch)
        return self._codec.unpack(batch, {EMBEDDINGS.name: self._rows[: len(batch)]})

    def probe(self) -> None:
        """See `Engine`."""


def microseconds(length: int) -> float:
    """Of a text of so many tokens, the least of all rounds."""
    rng = np.random.default_rng(0)
    asked = {HEAD.name: EmbeddingRequest()}
    queries = [
        Encoding(rng.integers(5, 900, length, dtype=np.int32), np.zeros(length, np.int32), asked)
        for _ in range(TEXTS)
    ]
    message = frames.encode_run(frames.Run(1, float("inf"), 0, False, queries))
    scheduler = Scheduler(
        Instant(),
        SchedulerLimits(
            workers=0, max_batch_tokens=8192, max_queue_tokens=2**31, stall_timeout_s=60
        ),
    )

    def send(ended: Future[BatchResult]) -> None:
        frames.encode_done(1, ended.result())

    def play() -> float:
        began = time.thread_time()
        for _ in range(REQUESTS):
            run = frames.decode_run(message)
            scheduler.submit(run.encodings, run.deadline).add_done_callback(send)
        while scheduler.queued_tokens:
            scheduler._run(0, scheduler._take_now())
        return time.thread_time() - began

    best = min(play() for _ in range(ROUNDS))
    scheduler.close()
    return best / (REQUESTS * TEXTS) * 1e6


if __name__ == "__main__":
    for length in LENGTHS:
        cost = microseconds(length)
        print(
            f"{length} tokens: {cost:.1f} us a text, so {1e6 / cost:,.0f} texts/s at most in one engine process"
        )
