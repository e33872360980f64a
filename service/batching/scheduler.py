"""Decides what runs next: a request's encodings go in at once, one future comes out.

Work-conserving and late-binding: an idle worker takes what is useful now, and no request waits for
a batch to fill. A batch holds encodings of one length, so nothing is padded; of any lengths, if
the engine supports it. Fair queueing over tokens (Demers et al. 1989) decides the order: each
encoding is tagged with the virtual time of its request's arrival plus the request's tokens before
it. The smallest tag runs next, with others of its length. Virtual time advances by the tokens that
each pending request would have received if all were served at once. So a single text does not
wait behind a bulk request, and a bulk request does not wait for ever behind single texts.

Knows no text and no HTTP.
"""

import heapq
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import NamedTuple

from model_store.batch import Encoding, HeadOutputs
from service.core import (
    MAX_BATCH_VOCABULARY_ROWS,
    MAX_PADDING_FACTOR,
    BatchReport,
    BatchResult,
    DeadlineExceeded,
    Engine,
    EngineDead,
    EngineFailed,
    Overloaded,
    ServiceError,
    ShuttingDown,
)

_RATE_WEIGHT = 0.1
"""Weight of the newest batch in the running mean of tokens per second."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How a scheduler batches and when it gives up.

    Attributes:
        workers: threads that run batches, one per core.
        max_batch_tokens: most tokens per batch; a longer single encoding runs alone.
        max_queue_tokens: most tokens that may wait. A request that finds the queue empty is
            admitted whatever its size.
        stall_timeout_s: a run that takes longer means that the engine is dead.
    """

    workers: int
    max_batch_tokens: int
    max_queue_tokens: int
    stall_timeout_s: float


class PendingRequest(Future[BatchResult]):
    """A request's future, and what the request still waits for.

    Attributes:
        outputs: per encoding, None until it ran.
        missing: how many outputs are None.
        queued_tokens: of the encodings that no worker has taken.
        started: when a worker took the first encoding; None until then.
    """

    def __init__(self, encodings: int, tokens: int, deadline: float) -> None:
        super().__init__()
        self.deadline = deadline
        self.submitted = time.monotonic()
        self.outputs: list[HeadOutputs | None] = [None] * encodings
        self.missing = encodings
        self.queued_tokens = tokens
        self.started: float | None = None


class QueuedEncoding(NamedTuple):
    """One queued encoding. Ordered by turn, and a tuple: heaps compare it without calling Python."""

    tag: float
    serial: int  # unique, so nothing after it is compared
    tokens: int
    vocabulary_rows: int
    encoding: Encoding
    request: PendingRequest
    index: int  # of the encoding in its request


class Scheduler:
    """A queue and the workers that empty it, for one model.

    Args:
        engine: runs batches; all workers call it at once.
        limits: see `SchedulerLimits`.
        on_batch: called after each batch, on the worker thread.
        on_dead: called once, on any thread, when the engine is dead.
    """

    def __init__(
        self,
        engine: Engine,
        limits: SchedulerLimits,
        *,
        on_batch: Callable[[BatchReport], None] = lambda _: None,
        on_dead: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._on_batch = on_batch
        self._on_dead = on_dead

        self._changed = threading.Condition()  # guards all below
        self._groups: dict[
            int, list[QueuedEncoding]
        ] = {}  # by length, or all in one, each a heap by turn
        self._pending: set[PendingRequest] = set()
        self._running: dict[int, float] = {}  # worker's number -> when its run began
        self._queued_tokens = 0
        self._dropped_tokens = 0  # at least those of ended requests that still lie in the groups
        self._virtual_time = 0.0
        self._serial = 0
        self._idle = 0
        self._tokens_per_s = 0.0  # of one worker
        self._draining = False
        self._dead: str | None = None
        self._closing = False
        self._ended = threading.Event()

        self._workers = [
            threading.Thread(
                target=self._work, args=(number,), name=f"worker-{number}", daemon=True
            )
            for number in range(limits.workers)
        ]
        self._watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        for thread in (*self._workers, self._watchdog):
            thread.start()

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait."""
        return self._queued_tokens

    @property
    def dead(self) -> str | None:
        """Why the engine is dead; None while it lives."""
        return self._dead

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def submit(
        self, encodings: Sequence[Encoding], deadline: float, *, accepted: bool = False
    ) -> Future[BatchResult]:
        """See `core.Queue`."""
        lengths = list(map(len, encodings))
        tokens = sum(lengths)
        with self._changed:
            if self._dead is not None:
                raise EngineDead(f"the engine is dead: {self._dead}")
            if self._closing or (self._draining and not accepted):
                raise ShuttingDown("the server is shutting down")
            if self._queued_tokens and self._queued_tokens + tokens > self._limits.max_queue_tokens:
                raise Overloaded(
                    f"the queue holds {self._queued_tokens} tokens; with this request's {tokens} "
                    f"it would pass its limit of {self._limits.max_queue_tokens}",
                    self._retry_after_s(),
                )
            request = PendingRequest(len(encodings), tokens, deadline)
            self._pending.add(request)
            request.add_done_callback(self._forget)
            tag, mixed = self._virtual_time, self._engine.supports_varlen
            for index, (encoding, length) in enumerate(zip(encodings, lengths, strict=True)):
                group = self._groups.setdefault(0 if mixed else length, [])
                queued = QueuedEncoding(
                    tag, self._serial, length, encoding.vocabulary_rows, encoding, request, index
                )
                heapq.heappush(group, queued)
                self._serial += 1
                tag += length
            self._queued_tokens += tokens
            self._changed.notify(len(encodings))
        return request

    def drain(self) -> None:
        """Admit nothing more; what was admitted runs on."""
        self._draining = True

    def close(self, timeout_s: float = 5.0) -> None:
        """See `core.Queue`."""
        self.drain()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._fail_pending(
            lambda: ShuttingDown("the server shut down before this request was answered")
        )
        self._ended.set()
        if self._dead is None:  # a dead engine's threads may never end
            end = time.monotonic() + timeout_s
            for thread in (*self._workers, self._watchdog):
                thread.join(max(0.0, end - time.monotonic()))

    def _retry_after_s(self) -> int:
        rate = self._tokens_per_s * len(self._workers)
        return max(1, math.ceil(self._queued_tokens / rate)) if rate else 1

    # ---- a worker's life -------------------------------------------------------------------------------------------

    def _work(self, number: int) -> None:
        try:
            while batch := self._take():
                self._run(number, batch)
        except (
            BaseException
        ) as error:  # whatever ends a worker ends the service, not just the thread
            self._die(f"a worker ended with {type(error).__name__}")

    def _take(self) -> list[QueuedEncoding]:
        """Wait for something to do and take a batch of it; empty when the scheduler closes."""
        with self._changed:
            while not self._closing:
                if self._groups:
                    if batch := self._take_now():
                        return batch
                else:
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
            return []

    def _take_now(self) -> list[QueuedEncoding]:
        """Take the encodings of one group whose turn it is; the caller holds the lock."""
        key = min(self._groups, key=lambda key: self._groups[key][0])
        group = self._groups[key]
        self._virtual_time = max(self._virtual_time, group[0].tag)
        # Idle workers get their share. A device that supports variable lengths runs one batch at
        # a time; its other worker only packs the next batch.
        varlen = self._engine.supports_varlen
        share = len(group) if varlen else math.ceil(len(group) / (self._idle + 1))
        batch: list[QueuedEncoding] = []
        tokens = rows = longest = 0
        now = time.monotonic()
        while group and len(batch) < share:
            queued = group[0]
            rows += queued.vocabulary_rows
            longest = max(longest, queued.tokens)
            cells = (len(batch) + 1) * longest
            if batch and self._is_full(tokens + queued.tokens, rows, cells):
                break
            heapq.heappop(group)
            if self._drop_if_over(queued, now):
                continue
            batch.append(queued)
            tokens += queued.tokens
        if not group:
            self._groups.pop(key, None)  # a sweep may have removed the group
        # Encodings that ran ahead of their turn, for their length, cost no other request its turn:
        # virtual time does not advance for them.
        in_turn = sum(queued.tokens for queued in batch if queued.tag <= self._virtual_time)
        self._virtual_time += in_turn / max(1, len(self._pending))
        return batch

    def _is_full(self, tokens: int, vocabulary_rows: int, cells: int) -> bool:
        limit = self._limits.max_batch_tokens
        return (
            tokens > limit
            or vocabulary_rows > MAX_BATCH_VOCABULARY_ROWS
            or cells > MAX_PADDING_FACTOR * limit
        )

    def _drop_if_over(self, queued: QueuedEncoding, now: float) -> bool:
        """Return whether the encoding's request has ended; note that it starts if not."""
        request = queued.request
        if request.done():  # cancelled, or failed already
            return True
        request.queued_tokens -= queued.tokens
        self._queued_tokens -= queued.tokens
        if request.deadline <= now:
            self._finish(request, DeadlineExceeded("the request's time was over before it ran"))
            return True
        if request.started is None:
            request.started = now
        return False

    def _run(self, number: int, batch: list[QueuedEncoding]) -> None:
        """Run a batch; if the engine raises, halve it until only the failing encoding is left."""
        if self._dead is not None:
            return
        started = time.monotonic()
        with self._changed:
            self._running[number] = started
        try:
            outputs = self._engine.run([queued.encoding for queued in batch])
        except (
            Exception
        ) as error:  # the runtime's errors have no common type; each ends in an answer
            if len(batch) > 1:
                middle = len(batch) // 2
                for half in (batch[:middle], batch[middle:]):
                    self._run(number, half)
                return
            self._fail_one(batch[0].request, error)
            return
        finally:
            with self._changed:
                self._running.pop(number, None)
        seconds = time.monotonic() - started
        tokens = sum(queued.tokens for queued in batch)
        self._deliver(batch, outputs, tokens / max(seconds, 1e-9))
        self._on_batch(BatchReport(len(batch), tokens, seconds))

    def _deliver(
        self, batch: list[QueuedEncoding], outputs: list[HeadOutputs], tokens_per_s: float
    ) -> None:
        done = []
        with self._changed:
            weight = _RATE_WEIGHT if self._tokens_per_s else 1.0
            self._tokens_per_s += weight * (tokens_per_s - self._tokens_per_s)
            for queued, output in zip(batch, outputs, strict=True):
                request = queued.request
                request.outputs[queued.index] = output
                request.missing -= 1
                if not request.missing:
                    done.append(request)
        for request in done:
            self._finish(request, None)

    def _fail_one(self, request: PendingRequest, error: Exception) -> None:
        self._finish(
            request, EngineFailed(f"the engine cannot run this input ({type(error).__name__})")
        )
        try:
            self._engine.probe()
        except Exception as probe_error:  # not the input: the engine itself is broken
            self._die(
                f"after an error it could not repeat its golden outputs ({type(probe_error).__name__})"
            )

    def _finish(self, request: PendingRequest, error: ServiceError | None) -> None:
        try:
            if error is not None:
                request.set_exception(error)
                return
            assert request.started is not None
            outputs = [output for output in request.outputs if output is not None]
            done = time.monotonic()
            request.set_result(
                BatchResult(outputs, request.started - request.submitted, done - request.started)
            )
        except InvalidStateError:
            pass  # it was cancelled, or failed by another thread, a moment ago

    def _forget(self, request: Future[BatchResult]) -> None:
        """Its future has ended: what it still has in the queue waits no more, though it is dropped only when its turn comes."""
        assert isinstance(request, PendingRequest)
        with self._changed:
            self._pending.discard(request)
            self._queued_tokens -= request.queued_tokens
            self._dropped_tokens += request.queued_tokens
            request.queued_tokens = 0
            if self._dropped_tokens > self._limits.max_queue_tokens:
                self._sweep()
        if request.cancelled():
            request.set_running_or_notify_cancel()  # tells those who wait on it in other threads

    def _sweep(self) -> None:
        """Take what has ended out of the groups, so that memory is bounded by the queue's limit; the lock is held."""
        self._dropped_tokens = 0
        for length, group in list(self._groups.items()):
            group[:] = [queued for queued in group if not queued.request.done()]
            heapq.heapify(group)
            if not group:
                del self._groups[length]

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Declare the engine dead when a run exceeds the stall timeout."""
        wait_s = self._limits.stall_timeout_s
        while not self._ended.wait(wait_s):
            with self._changed:
                oldest = min(self._running.values(), default=None)
            left_s = (
                self._limits.stall_timeout_s
                if oldest is None
                else oldest + self._limits.stall_timeout_s - time.monotonic()
            )
            if left_s <= 0:
                self._die(f"a run took longer than {self._limits.stall_timeout_s:g} s")
                return
            wait_s = left_s

    def _die(self, reason: str) -> None:
        with self._changed:
            if self._dead is not None or self._closing:
                return
            self._dead = reason
            self._closing = True  # workers that still live take nothing more
            self._changed.notify_all()
        self._ended.set()
        self._fail_pending(lambda: EngineDead(f"the engine is dead: {reason}"))
        self._on_dead(reason)

    def _fail_pending(self, make_error: Callable[[], ServiceError]) -> None:
        with self._changed:
            pending = list(self._pending)
            self._groups.clear()
        for request in pending:
            self._finish(request, make_error())
