"""Measures what a text costs an engine process beside the graph.

    python bench/studies/engine_cost.py

The cost covers reading, queueing, batching, packing, unpacking and sending. One thread does all of
these steps in turn. Times are processor times of the thread, so other work on the machine hardly
changes them. The study leaves out the sockets, the copies to and from the device, and the cost of
switching threads. So the result is an upper bound on the texts per second of one engine process,
however fast its device is.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from cloze.model_store import Store
from cloze.model_store.batch import BatchCodec, Encoding, HeadOutputs
from cloze.model_store.heads import HeadRequest
from cloze.model_store.heads.embedding import EMBEDDINGS, HEAD
from cloze.model_store.layouts import Layout
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.model_store.manifest import Precision
from cloze.service.batching.admission import SchedulerLimits
from cloze.service.batching.fair_queue import Submission, Terms
from cloze.service.batching.scheduler import Scheduler
from cloze.service.core import BatchResult, Device
from cloze.service.processes import frames

REQUESTS, TEXTS, ROUNDS = 200, 32, 5
LENGTHS = (12, 31, 174)
"""Mean tokens of a search question, of a mix of texts, and of a question with its paragraph."""

DIMENSIONS = 768
BATCH_TOKENS = 8192


class Instant:
    """An engine that packs and unpacks batches, and computes nothing between the two steps."""

    device = Device.CUDA
    precision = Precision.FP16
    reason = "it computes nothing"
    supports_varlen = True
    adapters = None

    def __init__(self) -> None:
        manifest = Store(DEFAULT_ROOT).open("cloze-bert").manifest
        self._codec = BatchCodec(manifest.graph_spec(Layout.PACKED))
        self._rows = np.ones((BATCH_TOKENS, DIMENSIONS), np.float32)

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:  # noqa: ARG002
        """Return constant vectors; see `Engine`."""
        return self._codec.pack(batch).unpack({EMBEDDINGS.name: self._rows[: len(batch)]})

    def probe(self) -> None:
        """Do nothing; see `Engine`."""


def microseconds(length: int) -> float:
    """Return the microseconds per text of `length` tokens, in the fastest round."""
    limits = SchedulerLimits(
        workers=0,
        max_batch_tokens=BATCH_TOKENS,
        max_queue_tokens=2**31,
        stall_timeout_s=60,
    )
    scheduler = Scheduler(Instant(), limits)
    message = _message(length)
    fastest = min(_round_s(scheduler, message) for _ in range(ROUNDS))
    scheduler.close()
    return fastest / (REQUESTS * TEXTS) * 1e6


def _message(length: int) -> bytes:
    """Return the message of one request, as a front end sends them."""
    rng = np.random.default_rng(0)
    requests = {HEAD.name: HeadRequest()}
    encodings = [
        Encoding(rng.integers(5, 900, length, dtype=np.int32), np.zeros(length, np.int32), requests)
        for _ in range(TEXTS)
    ]
    return frames.encode_run(frames.Run(1, 0, Terms(float("inf")), encodings))


def _round_s(scheduler: Scheduler, message: bytes) -> float:
    """Return the processor seconds of all requests, from received messages to encoded answers."""
    began = time.thread_time()
    for _ in range(REQUESTS):
        run = frames.decode_request(message)
        assert isinstance(run, frames.Run)
        submission = Submission(run.terms, run.encodings)
        scheduler.submit(submission)
        submission.add_done_callback(_encode_answer)
    while scheduler.state.tokens:
        taken = scheduler._take(0)
        assert taken is not None
        scheduler._run(0, taken.encodings, taken.fill)
    return time.thread_time() - began


def _encode_answer(done: Future[BatchResult]) -> None:
    frames.encode_answer(frames.Answer(1, done.result()))


if __name__ == "__main__":
    for length in LENGTHS:
        cost = microseconds(length)
        bound = f"{1e6 / cost:,.0f} texts/s at most in one engine process"
        print(f"{length} tokens: {cost:.1f} us per text, so {bound}")
