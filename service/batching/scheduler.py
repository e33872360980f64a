"""The scheduler of one model: queues encodings, and runs them in batches on worker threads.

The scheduler is work-conserving and late-binding: an idle worker takes a batch at once, and no
request waits for a batch to fill. All encodings of a batch have the same length, so that a batch
needs no padding. If the engine supports variable-length batches, the lengths may differ.
`fair_queue` has the order.

A request is admitted if its first batch is expected to start soon enough (`admission`).

On a CPU, a batch has as many tokens as run within the latency objective, at the measured rate. A
text that is longer than a batch cannot be interrupted. While all workers run such texts, one more
worker runs shorter ones, and shares the cores with them
(docs/decisions/0014-long-and-short-texts.md).
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from cloze.model_store.batch import HeadOutputs
from cloze.service.batching.admission import Admission
from cloze.service.batching.fair_queue import NOTHING_TAKEN, FairQueue, Taken
from cloze.service.batching.lines import LineKey, PendingRequest, QueuedEncoding
from cloze.service.batching.measures import Activity
from cloze.service.batching.watchdog import Watchdog
from cloze.service.core import (
    BatchFill,
    BatchReport,
    BatchResult,
    DeadlineExceeded,
    Engine,
    EngineDead,
    EngineFailed,
    ExpectedWait,
    QueueState,
    ServiceError,
    ShuttingDown,
    Submission,
)

_WORKER_NICE = 4
"""Nice value of the workers, so that the event loop runs at once when it has something to do.

With equal priority, an overloaded server answers probes and refuses requests only after seconds
(docs/decisions/0017-admission-by-time.md).
"""

_MIN_BATCH_TOKENS = 128
"""Tokens that a batch may have however slow the processor is; smaller batches cost throughput."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of a scheduler.

    Attributes:
        workers: number of threads that run batches.
        max_batch_tokens: most tokens per batch; a longer single encoding runs alone.
        max_queue_tokens: most tokens that may wait. An empty queue admits a request of any size.
        max_wait_s: longest expected wait of a request that states no limit; 0: no such limit.
        stall_timeout_s: seconds that a run may take beyond ten times its predicted time. After
            that, the engine hangs.
        batch_latency_s: longest duration of a batch of several encodings; 0: no such limit.
    """

    workers: int
    max_batch_tokens: int
    max_queue_tokens: int
    stall_timeout_s: float
    batch_latency_s: float = 0.0
    max_wait_s: float = 0.0


class Scheduler:
    """The queue of one model's requests and the worker threads that run the batches.

    Nothing runs before `start`.

    Args:
        engine: runs the batches; all workers call the engine at once.
        limits: the limits of the queue, the batches and the runs.
        activity: counts the busy workers of all schedulers of the process.
        on_batch: called after each batch, on the worker thread.
        on_dead: called once, on any thread, when the engine is dead.
    """

    def __init__(
        self,
        engine: Engine,
        limits: SchedulerLimits,
        *,
        activity: Activity | None = None,
        on_batch: Callable[[BatchReport], None] = lambda _: None,
        on_dead: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._activity = activity or Activity()
        self._on_batch = on_batch
        self._on_dead = on_dead

        # The lock guards all attributes up to `_closing`. To enter the lock itself costs less than
        # to enter the condition.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._short_texts = threading.Condition(self._lock)  # wakes the worker for short texts
        self._queue = FairQueue(
            varlen=engine.supports_varlen, max_dropped_tokens=limits.max_queue_tokens
        )
        self._on_long_texts: set[int] = set()  # numbers of workers
        self._idle_workers = 0
        self._admission = Admission(
            self._queue,
            self._activity,
            limits.workers,
            limits.max_queue_tokens,
            limits.max_wait_s,
        )
        self._draining = False
        self._dead: str | None = None
        self._closing = False

        self._watchdog = Watchdog(limits.stall_timeout_s, self._die)
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads, which run until `close`."""
        workers = self._limits.workers
        for number in range(workers):
            take = partial(self._take, number)
            self._start_thread(f"worker-{number}", partial(self._work, number, take))
        if not self._engine.supports_varlen:
            work = partial(self._work, workers, self._take_short)
            self._start_thread("worker-for-short-texts", work)
        self._start_thread("watchdog", self._watchdog.watch)

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def state(self) -> QueueState:
        """What waits."""
        return QueueState(self._queue.tokens, self._admission.backlog_s)

    @property
    def dead(self) -> str | None:
        """Why the engine is dead; None while the engine works."""
        return self._dead

    @property
    def draining(self) -> bool:
        """Whether the scheduler refuses new requests."""
        return self._draining

    def submit(self, submission: Submission) -> Future[BatchResult]:
        """Admit all encodings of a request or none; see `core.Queue`."""
        with self._lock:
            self._check_alive()
            if not submission.later_round:
                if self._draining and not submission.accepted:
                    raise ShuttingDown("the server is shutting down")
                self._admission.check(submission)
            tokens, timeout_s = submission.tokens, submission.timeout_s
            line = LineKey.of(tokens, timeout_s, later_round=submission.later_round)
            request = self._queue.add(submission, line)
            request.add_done_callback(self._forget)
            self._changed.notify(len(submission.encodings))
            self._wake_for_short_texts()
        return request

    def _check_alive(self) -> None:
        """Raise unless queued encodings will run; the caller holds the lock."""
        if self._dead is not None:
            raise EngineDead(f"the engine is dead: {self._dead}")
        if self._closing:
            raise ShuttingDown("the server is shutting down")

    def expected_wait(
        self, client: str, tokens: int, timeout_s: float | None, unsubmitted: int = 0
    ) -> ExpectedWait:
        """Return the wait of a request that arrives now; see `core.Queue`."""
        return self._admission.expected_wait(client, tokens, timeout_s, unsubmitted)

    def drain(self) -> None:
        """Stop admitting requests; admitted requests still run."""
        self._draining = True

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail pending requests and end the threads; see `core.Queue`."""
        self.drain()
        with self._lock:
            self._closing = True
            self._notify_all()
        self._fail_pending(
            lambda: ShuttingDown("the server shut down before this request was answered")
        )
        self._watchdog.end()
        if self._dead is None:  # the threads of a dead engine may never end
            deadline = time.monotonic() + timeout_s
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _batch_tokens(self) -> int:
        """Return the most tokens of a batch now; a longer single encoding runs alone."""
        limits = self._limits
        tokens_per_s = self._admission.tokens_per_s
        if not limits.batch_latency_s or not tokens_per_s:
            return limits.max_batch_tokens
        within_latency = int(tokens_per_s * limits.batch_latency_s)
        return min(limits.max_batch_tokens, max(_MIN_BATCH_TOKENS, within_latency))

    # ---- worker threads -------------------------------------------------------------------------

    def _work(self, number: int, take: Callable[[], Taken]) -> None:
        """Run batches until the scheduler closes."""
        if sys.platform == "linux":
            with suppress(OSError):  # a sandbox may forbid it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WORKER_NICE)
        self._activity.begin()
        try:
            while (taken := take()).batch:
                self._run(number, taken.batch, taken.fill)
        except BaseException as error:  # without its worker the service must end too
            self._die(f"a worker ended with {type(error).__name__}")
        finally:
            self._activity.end()

    def _take(self, number: int) -> Taken:
        """Wait for queued encodings and take a batch; an empty one when the scheduler closes."""
        with self._lock:
            self._on_long_texts.discard(number)
            while not self._closing:
                if not self._queue:
                    self._idle_workers += 1
                    self._wait(self._changed)
                    self._idle_workers -= 1
                elif (taken := self._take_now(takers=self._idle_workers + 1)).batch:
                    if taken.batch[0].tokens > self._batch_tokens():
                        self._on_long_texts.add(number)
                        self._wake_for_short_texts()
                    return taken
            return NOTHING_TAKEN

    def _take_short(self) -> Taken:
        """Wait until all workers run long texts and short ones wait, and take a batch of these.

        Returns:
            The batch; an empty one when the scheduler closes.
        """
        with self._lock:
            while not self._closing:
                longest = self._batch_tokens()
                if not self._all_on_long_texts or not self._queue.has_up_to(longest):
                    self._wait(self._short_texts)
                elif (taken := self._take_now(longest=longest)).batch:
                    return taken
            return NOTHING_TAKEN

    @property
    def _all_on_long_texts(self) -> bool:
        return len(self._on_long_texts) >= self._limits.workers

    def _wake_for_short_texts(self) -> None:
        """Wake the worker for short texts if it may have something to do."""
        if self._all_on_long_texts and self._queue:
            self._short_texts.notify()

    def _wait(self, condition: threading.Condition) -> None:
        """Wait until another thread notifies the condition; the caller holds the lock."""
        self._activity.end()
        condition.wait()
        self._activity.begin()

    def _notify_all(self) -> None:
        self._changed.notify_all()
        self._short_texts.notify_all()

    def _take_now(self, *, takers: int = 1, longest: int | None = None) -> Taken:
        """Take a batch, and end the requests whose time is over; the caller holds the lock."""
        taken = self._queue.take(
            self._batch_tokens(), takers=takers, longest=longest, rate=self._admission.rate
        )
        for request in taken.expired:
            left_s = request.deadline - time.monotonic()
            message = (
                "the request's time was over before it ran"
                if left_s <= 0
                else f"the workers have become slower, and the request cannot end in the "
                f"{left_s:.1f} s that are left of its time"
            )
            self._finish(request, DeadlineExceeded(message))
        return taken

    def _run(self, number: int, batch: list[QueuedEncoding], fill: BatchFill) -> None:
        """Run a batch. If the engine raises, halve the batch until one failing encoding is left."""
        if self._dead is not None:
            return
        started = time.monotonic()
        tokens = sum(queued.tokens for queued in batch)
        with self._lock:
            rate = self._admission.tokens_per_s
            alone = self._activity.busy == 1 and not self._queue
        self._watchdog.began(number, tokens / rate if rate else None)
        try:
            encodings = [queued.encoding for queued in batch]
            outputs = self._engine.run(encodings, alone=alone)
        except Exception as error:  # the runtime's errors have no common type
            if len(batch) == 1:
                self._fail_one(batch[0].request, error)
                return
            middle = len(batch) // 2
            for half in (batch[:middle], batch[middle:]):
                self._run(number, half, BatchFill.ERROR)
            return
        finally:
            self._watchdog.finished(number)
        seconds = time.monotonic() - started
        traces = {trace for queued in batch if (trace := queued.request.trace)}
        self._on_batch(BatchReport(len(batch), tokens, seconds, fill, tuple(traces)))
        # Last, because the event loop wakes up and then waits for this thread to be idle.
        self._deliver(batch, outputs, tokens / max(seconds, 1e-9))

    def _deliver(
        self, batch: list[QueuedEncoding], outputs: list[HeadOutputs], tokens_per_s: float
    ) -> None:
        """Store the outputs of a batch, and finish the requests that have all their outputs."""
        complete = []
        with self._lock:
            tokens = sum(queued.tokens for queued in batch)
            self._admission.batch_ended(tokens, tokens_per_s)
            for queued, output in zip(batch, outputs, strict=True):
                request = queued.request
                request.outputs[queued.position] = output
                request.missing -= 1
                if not request.missing:
                    complete.append(request)
        for request in complete:
            self._finish(request, None)

    def _fail_one(self, request: PendingRequest, error: Exception) -> None:
        """Fail the request of an encoding that the engine cannot run, and probe the engine."""
        self._finish(
            request, EngineFailed(f"the engine cannot run this input ({type(error).__name__})")
        )
        try:
            self._engine.probe()
        except Exception as probe_error:  # the engine fails on its golden outputs too
            name = type(probe_error).__name__
            self._die(f"after an error it could not repeat its golden outputs ({name})")

    def _finish(self, request: PendingRequest, error: ServiceError | None) -> None:
        """End a request: with an error, or with its outputs if `error` is None."""
        try:
            if error is not None:
                request.set_exception(error)
                return
            assert request.started is not None
            outputs = [output for output in request.outputs if output is not None]
            inference_s = time.monotonic() - request.started
            queue_s = request.started - request.submitted
            request.set_result(BatchResult(outputs, queue_s, inference_s))
        except InvalidStateError:
            pass  # another thread has cancelled or failed the request in the meantime

    def _forget(self, request: Future[BatchResult]) -> None:
        """Subtract an ended request from the queue; called when its future ends."""
        assert isinstance(request, PendingRequest)
        with self._lock:
            self._queue.forget(request)
        if request.cancelled():
            request.set_running_or_notify_cancel()  # wakes threads that wait for the future

    # ---- failure --------------------------------------------------------------------------------

    def _die(self, reason: str) -> None:
        """Declare the engine dead: fail all pending requests and stop the workers."""
        with self._lock:
            if self._closing:  # or dead already
                return
            self._dead = reason
            self._closing = True
            self._notify_all()
        self._watchdog.end()
        self._fail_pending(lambda: EngineDead(f"the engine is dead: {reason}"))
        self._on_dead(reason)

    def _fail_pending(self, make_error: Callable[[], ServiceError]) -> None:
        """Clear the queue, and fail every pending request with an error of its own."""
        with self._lock:
            pending = list(self._queue.requests)
            self._queue.clear()
        for request in pending:
            self._finish(request, make_error())
