"""Does equal work once: runs equal encodings together, and keeps results for later ones.

Two encodings are *equal* if a client sends both to one model with the same token ids, token types
and requests to heads. A client is that of the fair queue: an API key, or an address. So no client
can find out by the time of an answer what another one has sent. The results of heads are numbers,
never text.

Example: a request has the texts A, B, A and C. Another request of the client, for B, waits in the
queue, and the result of C is kept. The request submits A alone, once, so the tokens of A are what
admission counts. It joins the run of B, and its answer has four results.
"""

import asyncio
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from functools import partial
from hashlib import blake2b

import numpy as np
import orjson
from numpy.typing import NDArray

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.service.batching.fair_queue import LineKey, Queue, Submission, Terms
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import BatchResult, ReuseCounts
from cloze.service.errors import DeadlineExceeded, EngineFailed, Overloaded
from cloze.service.threads import run_anywhere

_INLINE_TOKENS = 1_024  # encodings of more are looked up, and kept, on a thread: 10 us each

_ENTRY_BYTES, _ARRAY_BYTES = 400, 200  # of kept results besides their numbers


class KeptResults:
    """Results by key, in `max_bytes` of memory: those that were not used for longest make room.

    Any thread may call the methods.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        # By key: results, and their memory. The last used ones are last.
        self._kept: OrderedDict[bytes, tuple[HeadOutputs, int]] = OrderedDict()
        self.bytes = self.evictions = 0

    def find(self, keys: Sequence[bytes]) -> dict[bytes, HeadOutputs]:
        """Return what is kept of these keys; the arrays are read-only."""
        found = {}
        with self._lock:
            for key in keys:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    found[key] = self._kept[key][0]
        return found

    def keep(self, results: Mapping[bytes, HeadOutputs]) -> None:
        """Keep copies of results. Results that are larger than the memory are not kept."""
        for key, outputs in results.items():
            if key in self._kept or (entry := _copies(outputs))[1] > self.max_bytes:
                continue
            with self._lock:
                self.bytes += entry[1] - self._kept.get(key, ({}, 0))[1]
                self._kept[key] = entry
                while self.bytes > self.max_bytes:
                    _, (_, size) = self._kept.popitem(last=False)
                    self.bytes -= size
                    self.evictions += 1

    def clear(self) -> None:
        """Drop all results."""
        with self._lock:
            self._kept.clear()
            self.bytes = 0


def _copies(outputs: HeadOutputs) -> tuple[HeadOutputs, int]:
    """Return results in arrays of their own, which are not views of a batch, and their memory."""
    copies, size = {}, _ENTRY_BYTES
    for head, result in outputs.items():
        arrays = [getattr(result, each.name).copy() for each in fields(result)]
        for array in arrays:
            array.flags.writeable = False
            size += _ARRAY_BYTES + array.nbytes
        copies[head] = type(result)(*arrays)
    return copies, size


class _Digests(dict[int, str]):
    """What stands for arrays in descriptions; the encodings of a request share arrays."""

    def of(self, array: NDArray[np.generic]) -> str:
        """Return the digest of an array that lives at least as long as this object."""
        if (digest := self.get(id(array))) is None:
            digest = self[id(array)] = blake2b(array.tobytes(), digest_size=16).hexdigest()
        return digest


@dataclass(slots=True, eq=False)
class Run:
    """Encodings that one request has submitted, and for which other requests may wait too.

    Attributes:
        line: the line in which they wait, and whether in a later round. Only requests of the same
            line join the run, which comes before one of their own: a line is served in order.
        places: the index of each encoding in the submission, by its key.
        askers: number of requests that wait. The last one that leaves cancels the submission.
        ended: is set after the end of the submission.
    """

    submission: Submission
    line: tuple[LineKey, bool]
    places: Mapping[bytes, int]
    askers: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def error(self) -> BaseException | None:
        """Why the submission has failed; None if it has not."""
        return self.submission.exception()

    @property
    def is_own_error(self) -> bool:
        """Whether the error is only that of the request that has submitted the run.

        The request was refused, its time was over, or another one of its encodings has failed.
        """
        is_of_one = isinstance(self.error, EngineFailed) and len(self.places) > 1
        return is_of_one or isinstance(self.error, Overloaded | DeadlineExceeded)


class EqualWork:
    """Runs encodings on one event loop, equal ones once. All models of a process share it.

    Args:
        max_bytes: most memory of kept results; their keys are hashes, so no text stays in memory.
    """

    def __init__(self, max_bytes: int = 0, clock: Clock = CLOCK) -> None:
        self.kept = KeptResults(max_bytes)
        self._clock = clock
        self._secret = os.urandom(blake2b.MAX_KEY_SIZE)
        self._in_flight: dict[bytes, Run] = {}
        # In a callback, a run and its submission would refer to each other, and stay in memory.
        self._run_of: dict[Future[BatchResult], Run] = {}
        self._ended: deque[Future[BatchResult]] = deque()
        self._is_awake = False
        self._hits = self._misses = self._shared = 0

    def counts(self) -> ReuseCounts:
        """Return what was counted so far."""
        misses = self._misses if self.kept.max_bytes else 0
        return ReuseCounts(self._hits, misses, self._shared, self.kept.evictions, self.kept.bytes)

    async def run(
        self, model: str, queue: Queue, terms: Terms, encodings: Sequence[Encoding]
    ) -> BatchResult:
        """Return the results of encodings: kept ones, those of runs in flight, and of an own run.

        Without an own run, the wait counts as time in the queue. If this coroutine is cancelled,
        encodings are dropped for which no other request waits.

        Args:
            model: names the weights and the precision that the queue runs.

        Raises:
            ServiceError: the request gets no result.
        """
        is_short = sum([len(encoding) for encoding in encodings]) <= _INLINE_TOKENS
        keys, results = await run_anywhere(is_short, self._find, model, terms.client, encodings)
        distinct = dict(zip(keys, encodings, strict=True))
        hits = sum([key in results for key in keys]) if results else 0
        ran, queue_s, inference_s = 0, 0.0, 0.0
        while missing := {key: one for key, one in distinct.items() if key not in results}:
            own, run_of = self._runs(missing, queue, terms)
            runs, began = set(run_of.values()), self._clock.monotonic()
            await _wait(own, runs)
            waited_s = self._clock.monotonic() - began
            batch = own.submission.result() if own is not None else BatchResult([], waited_s, 0.0)
            queue_s, inference_s = queue_s + batch.queue_s, inference_s + batch.inference_s
            ran += len(batch.outputs)
            outputs = {run: run.submission.result().outputs for run in runs if run.error is None}
            for key, run in run_of.items():
                if run in outputs:
                    results[key] = outputs[run][run.places[key]]
            if self.kept.max_bytes:
                await run_anywhere(is_short, self.kept.keep, results)
            # What is missing now was admitted for a request that has failed, unless it was refused.
            if not any(isinstance(run.error, Overloaded) for run in runs):
                terms = terms._replace(later_round=True)
        self._hits, self._misses = self._hits + hits, self._misses + len(keys) - hits
        self._shared += len(keys) - hits - ran
        return BatchResult([results[key] for key in keys], queue_s, inference_s)

    def _find(
        self, model: str, client: str, encodings: Sequence[Encoding]
    ) -> tuple[list[bytes], dict[bytes, HeadOutputs]]:
        """Return the keys of encodings, and the results that are kept of them."""
        keys, digests = [], _Digests()
        for encoding in encodings:
            # Requests are numbers, lists and arrays; JSON has no NUL.
            described = orjson.dumps(
                (model, client, encoding.requests), digests.of, orjson.OPT_NON_STR_KEYS
            )
            arrays = encoding.input_ids.tobytes() + encoding.token_type_ids.tobytes()
            whole = described + b"\0" + arrays
            keys.append(blake2b(whole, key=self._secret, digest_size=16).digest())
        return keys, self.kept.find(keys)

    def _runs(
        self, missing: Mapping[bytes, Encoding], queue: Queue, terms: Terms
    ) -> tuple[Run | None, dict[bytes, Run]]:
        """Submit the encodings that are not in flight; return their run, and the run of each."""
        tokens = sum([len(encoding) for encoding in missing.values()])
        line = LineKey.of(tokens, terms.timeout_s, is_bulk=terms.is_bulk), terms.later_round
        in_flight = [(key, run) for key in missing if (run := self._in_flight.get(key)) is not None]
        joined = {k: run for k, run in in_flight if run.line == line and not run.submission.done()}
        work = [key for key in missing if key not in joined]
        if not work:
            return None, joined
        submission = Submission(terms, [missing[key] for key in work])
        own = Run(submission, (submission.key, line[1]), {k: i for i, k in enumerate(work)})
        queue.submit(submission)
        self._run_of[submission] = own
        submission.add_done_callback(partial(self._end, asyncio.get_running_loop()))
        self._in_flight.update(dict.fromkeys(work, own))
        return own, joined | dict.fromkeys(work, own)

    def _end(self, loop: asyncio.AbstractEventLoop, submission: Future[BatchResult]) -> None:
        """Wake the event loop, which then finds all runs that have ended. Called on any thread."""
        self._ended.append(submission)
        if not self._is_awake:
            self._is_awake = True
            try:
                loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop has closed, so nobody waits
                self._is_awake = False

    def _wake(self) -> None:
        """Forget the runs that have ended, and wake the requests that wait for them."""
        self._is_awake = False  # before the loop: a worker may append meanwhile
        while self._ended:
            run = self._run_of.pop(self._ended.popleft())
            for key in run.places:
                if self._in_flight.get(key) is run:
                    del self._in_flight[key]
            run.ended.set()


async def _wait(own: Run | None, runs: Iterable[Run]) -> None:
    """Wait for the end of all runs, or raise an error; cancel runs for which nobody else waits."""
    for run in runs:
        run.askers += 1
    try:
        if own is not None:
            await own.ended.wait()
            own.submission.result()
        for run in runs:
            await run.ended.wait()
            if run.error is not None and not run.is_own_error:
                raise type(run.error)(str(run.error))  # the traceback of the first has its body
    finally:
        for run in runs:
            run.askers -= 1
            if not run.askers:
                run.submission.cancel()
