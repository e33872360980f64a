"""The scheduler of one model: queues encodings, and runs them in batches on worker threads.

The scheduler is work-conserving and late-binding: an idle worker takes a batch at once, and no
request waits for a batch to fill. `admission` decides which requests wait, and `fair_queue` which
encodings run next.

On a CPU, a batch has as many tokens as run within the latency objective, at the measured rate. A
text that is longer than a batch cannot be interrupted. While all workers run such texts, one more
worker runs shorter ones, and shares the cores with them
(docs/decisions/0014-long-and-short-texts.md).
"""

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from cloze.model_store.batch import HeadOutputs
from cloze.service import errors
from cloze.service.batching.admission import Activity, Admission, SchedulerLimits
from cloze.service.batching.fair_queue import (
    Batch,
    ExpectedWait,
    FairQueue,
    LineKey,
    QueuedEncoding,
    QueueState,
    Submission,
)
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import BatchFill, BatchReport, BatchResult, Engine
from cloze.service.machine import lower_thread_priority

_WORKER_NICE = 4
"""Nice value of the workers. Only probes need it, when every request has a connection of its own.

Five times the capacity in questions: the p99 of /healthz is 0.15 s with it, and 8.6 s without. The
answers per second are the same (bench/results/load-cpu.md).
"""


class Scheduler:
    """The queue of one model's requests, and the threads that run batches from `start` on.

    Args:
        engine: runs the batches; all workers call the engine at once.
        activity: what all schedulers of the process share.
        on_batch: called after each batch, on the worker thread.
        on_dead: called once, on any thread, when the engine is dead.

    Attributes:
        dead_reason: why the engine is dead; None while the engine works.
    """

    def __init__(
        self,
        engine: Engine,
        limits: SchedulerLimits,
        *,
        activity: Activity | None = None,
        on_batch: Callable[[BatchReport], None] = lambda _: None,
        on_dead: Callable[[str], None] = lambda _: None,
        clock: Clock = CLOCK,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._activity = activity or Activity()
        self._on_batch = on_batch
        self._on_dead = on_dead
        self._clock = clock

        # The lock guards all attributes up to `_closing`, and `Activity`.
        self._lock = self._activity.lock
        self._changed = threading.Condition(self._lock)
        self._short_texts = threading.Condition(self._lock)  # wakes the worker for short texts
        self._queue = FairQueue(varlen=engine.supports_varlen)
        self._on_long_texts: set[int] = set()  # numbers of workers
        self._on_bulk: set[int] = set()  # numbers of workers
        self._idle_workers = 0
        self._last_run = clock.monotonic()  # end of the last batch
        self._probe_s: float | None = None  # duration of the last golden batch
        self._admission = Admission(self._queue, self._activity, limits)
        self._batch_tokens = limits.max_batch_tokens  # now; a longer single encoding runs alone
        self.dead_reason: str | None = None
        self._closing = False

        self._watchdog = Watchdog(limits.stall_timeout_s, self._die, clock)
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads, which run until `close`."""
        workers = self._limits.workers
        targets: dict[str, Callable[[], None]] = {
            f"worker-{number}": partial(self._work, number, partial(self._take, number))
            for number in range(workers)
        }
        if not self._engine.supports_varlen:
            targets["worker-for-short-texts"] = partial(self._work, workers, self._take_short)
        targets["watchdog"] = self._watchdog.watch
        for name, target in targets.items():
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def state(self) -> QueueState:
        """What waits."""
        tokens, rate = self._queue.tokens - self._queue.bulk_tokens, self._admission.rate
        return QueueState(tokens, tokens / rate if rate else 0.0)

    def submit(self, submission: Submission) -> None:
        """Admit all encodings of a request or none; see `fair_queue.Queue`."""
        terms, now = submission.terms, self._clock.monotonic()
        submission.submitted = now
        # What follows the engine takes time too. No deadline of a bulk request delays others.
        submission.due = math.inf if terms.is_bulk else now + 0.9 * (terms.deadline - now)
        with self._lock:
            if self.dead_reason is not None:
                raise errors.EngineDead(f"the engine is dead: {self.dead_reason}")
            if self._closing:
                raise errors.ShuttingDown("the server is shutting down")
            if self._queue.tokens and not terms.later_round:
                self._admission.check(submission, now)
            self._queue.add(submission)
            if not terms.is_bulk:
                self._activity.requests[terms.client] += 1
                self._activity.asked = now
            submission.add_done_callback(self._forget)
            self._changed.notify(submission.missing)
            if len(self._on_long_texts) >= self._limits.workers:
                self._short_texts.notify()

    def expected_wait(
        self, client: str, line: LineKey, tokens: int, unsubmitted: int = 0
    ) -> ExpectedWait:
        """Return the expected wait of a request that arrives now; see `fair_queue.Queue`."""
        if line.is_bulk or self._queue.tokens or unsubmitted:
            return self._admission.expected_wait(client, line, tokens, unsubmitted)
        rate, requests = self._admission.rate, self._activity.requests[client]
        each_s = tokens / rate if rate else 0.0  # the queue is empty
        return ExpectedWait(0.0, each_s, requests, lasts_s=each_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail pending requests and end the threads; see `fair_queue.Queue`."""
        self._end(
            lambda: errors.ShuttingDown("the server shut down before this request was answered")
        )
        if self.dead_reason is None:  # the threads of a dead engine may never end
            deadline = self._clock.monotonic() + timeout_s
            for thread in self._threads:
                thread.join(max(0.0, deadline - self._clock.monotonic()))

    def _end(self, make_error: Callable[[], errors.ServiceError]) -> None:
        """End the threads when they are free, and fail each pending request with its own error."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
            self._short_texts.notify_all()
            pending = list(self._queue.lines)
        self._watchdog.ended.set()
        for request in pending:
            request.end(make_error())

    def _work(self, number: int, take: Callable[[], Batch | None]) -> None:
        """Run batches until the scheduler closes."""
        lower_thread_priority(_WORKER_NICE)
        with self._lock:
            self._activity.busy += 1
        try:
            while (batch := take()) is not None:
                if batch.encodings:
                    self._run(number, batch.encodings, batch.fill)
                else:
                    self._run_canary(number)
        except BaseException as error:  # without its worker the service must end too
            self._die(f"a worker ended with {type(error).__name__}")
        finally:
            with self._lock:
                self._activity.busy -= 1

    def _take(self, number: int) -> Batch | None:
        """Wait for queued encodings and take a batch; None when the scheduler closes.

        A batch without encodings stands for the canary.
        """
        queue = self._queue
        with self._lock:
            self._on_long_texts.discard(number)
            self._on_bulk.discard(number)
            while not self._closing:
                now, longest = self._clock.monotonic(), self._batch_tokens
                with_bulk = not queue.bulk_tokens or self._may_run_bulk(now)
                if queue.tokens == (0 if with_bulk else queue.bulk_tokens):
                    self._idle_workers += 1
                    self._wait(self._changed, self._limits.canary_s if number == 0 else 0.0)
                    self._idle_workers -= 1
                    if number == 0 and self._is_canary_due:
                        # Else a short text would wait for the canary of a single worker.
                        self._on_long_texts.add(number)
                        return Batch(0, 0)
                    continue
                rate, takers = self._admission.rate, self._idle_workers + 1
                batch = queue.take(longest, now, takers=takers, rate=rate, with_bulk=with_bulk)
                if batch.expired:
                    self._expire(batch, now)
                if batch.encodings:
                    if batch.is_bulk:
                        self._on_bulk.add(number)
                        if queue.tokens:  # perhaps another worker may run bulk now
                            self._changed.notify()
                    if batch.longest > longest:
                        self._on_long_texts.add(number)
                        if len(self._on_long_texts) >= self._limits.workers:
                            self._short_texts.notify()
                    return batch
            return None

    def _take_short(self) -> Batch | None:
        """Wait until all workers run long texts and short ones wait, and take a batch of these."""
        with self._lock:
            while not self._closing:
                longest = self._batch_tokens
                all_on_long_texts = len(self._on_long_texts) >= self._limits.workers
                if not (all_on_long_texts and self._queue.has_up_to(longest)):
                    self._wait(self._short_texts)
                    continue
                now, rate = self._clock.monotonic(), self._admission.rate
                batch = self._queue.take(longest, now, longest=longest, rate=rate, with_bulk=False)
                if batch.expired:
                    self._expire(batch, now)
                if batch.encodings:
                    return batch
            return None

    def _wait(self, condition: threading.Condition, most_s: float = 0.0) -> None:
        """Wait until another thread notifies the condition; the caller holds the lock.

        Args:
            condition: a condition of the lock.
            most_s: longest wait; 0: without end.
        """
        self._activity.busy -= 1
        condition.wait(most_s or None)
        self._activity.busy += 1

    @property
    def _is_canary_due(self) -> bool:
        """Whether all workers are idle, and nothing has run for the time of a canary."""
        canary_s, others = self._limits.canary_s, self._limits.workers - 1
        is_idle = not self._queue.tokens and self._idle_workers == others and not self._closing
        return canary_s > 0 and is_idle and self._clock.monotonic() - self._last_run >= canary_s

    def _run_canary(self, number: int) -> None:
        """Run a golden batch, so that a lost device is noticed although nobody asks."""
        with self._watchdog.run(number, self._probe_s):
            try:
                seconds = self._probe()
            except Exception as error:  # the runtime's errors have no common type
                name = type(error).__name__
                self._die(f"it could not repeat its golden outputs while idle ({name})")
                return
        self._last_run = self._clock.monotonic()
        self._on_batch(BatchReport(0, 0, seconds, BatchFill.CANARY))

    def _probe(self) -> float:
        """Run a golden batch; return its duration, within ten times of which the next one ends."""
        started = self._clock.monotonic()
        self._engine.probe()
        self._probe_s = self._clock.monotonic() - started
        return self._probe_s

    def _may_run_bulk(self, now: float) -> bool:
        """Return whether one more worker may run a bulk batch.

        A batch cannot be interrupted. So while requests that are not bulk come, one worker is left
        to them: the next one starts at once, on a core of its own.
        """
        others_come = now - self._activity.asked < 1.0
        return len(self._on_bulk) < max(1, self._limits.workers - others_come)

    def _expire(self, batch: Batch, now: float) -> None:
        """End the requests that a batch has left out, because their time is or will be over."""
        for request in batch.expired:
            message = "the request's time was over before it ran"
            if (left_s := request.terms.deadline - now) > 0:
                message = (
                    "the workers have become slower, and the request cannot end in the "
                    f"{left_s:.1f} s that are left of its time"
                )
            request.end(errors.DeadlineExceeded(message))

    def _run(self, number: int, batch: list[QueuedEncoding], fill: BatchFill) -> None:
        """Run a batch. If the engine raises, halve the batch until one failing encoding is left."""
        if self.dead_reason is not None:
            return
        started = self._clock.monotonic()
        tokens = sum([queued.tokens for queued in batch])
        rate = self._admission.tokens_per_s
        is_bulk = batch[0].request.terms.is_bulk
        alone = self._activity.busy == 1 and not self._queue.tokens and not is_bulk
        with self._watchdog.run(number, tokens / rate if rate else None):
            try:
                encodings = [queued.encoding for queued in batch]
                outputs = self._engine.run(encodings, alone=alone)
            except Exception as error:  # the runtime's errors have no common type
                if len(batch) == 1:
                    self._fail(batch[0], error)
                    return
                middle = len(batch) // 2
                for half in (batch[:middle], batch[middle:]):
                    self._run(number, half, BatchFill.ERROR)
                return
        seconds = self._clock.monotonic() - started
        traces = {trace for queued in batch if (trace := queued.request.terms.trace)}
        self._on_batch(BatchReport(len(batch), tokens, seconds, fill, tuple(traces)))
        # Last, because the event loop wakes up and then waits for this thread to be idle.
        self._deliver(batch, outputs, seconds, alone=alone and not self._engine.supports_varlen)

    def _fail(self, queued: QueuedEncoding, error: Exception) -> None:
        """End the request of an encoding on which the engine raised, and check the engine.

        An engine that fails on its golden outputs too is dead.
        """
        if isinstance(error, errors.ServiceError):  # not of the engine
            queued.request.end(error)
            return
        count, which = len(queued.request.outputs), "this input"
        if count > 1:
            which = f"sequence {queued.position + 1} of {count} of this request"
        name = type(error).__name__
        queued.request.end(errors.EngineFailed(f"the engine cannot run {which} ({name})"))
        try:
            self._probe()
        except Exception as further:  # the runtime's errors have no common type
            name = type(further).__name__
            self._die(f"after an error it could not repeat its golden outputs ({name})")

    def _deliver(
        self,
        batch: list[QueuedEncoding],
        outputs: list[HeadOutputs],
        seconds: float,
        *,
        alone: bool = False,
    ) -> None:
        """Store the outputs of a batch, and end the requests that have all their outputs."""
        complete, limits, now = [], self._limits, self._clock.monotonic()
        with self._lock:
            tokens = sum([queued.tokens for queued in batch])
            is_bulk = batch[0].request.terms.is_bulk
            self._last_run = now
            self._admission.batch_ended(now, tokens, seconds, is_bulk=is_bulk, alone=alone)
            if limits.batch_latency_s:
                within_latency = int(self._admission.tokens_per_s * limits.batch_latency_s)
                least = max(128, within_latency)  # smaller batches cost throughput
                self._batch_tokens = min(limits.max_batch_tokens, least)
            for queued, output in zip(batch, outputs, strict=True):
                request = queued.request
                request.outputs[queued.position] = output
                request.missing -= 1
                if not request.missing:
                    complete.append(request)
        for request in complete:
            assert request.started is not None
            queue_s, inference_s = request.started - request.submitted, now - request.started
            request.end(BatchResult(request.outputs, queue_s, inference_s))

    def _forget(self, request: Future[BatchResult]) -> None:
        """Subtract an ended request from the queue; called when its future ends."""
        assert isinstance(request, Submission)
        with self._lock:
            self._queue.forget(request)
            requests, client = self._activity.requests, request.terms.client
            requests[client] -= not request.terms.is_bulk
            if not requests[client]:
                del requests[client]

    def _die(self, reason: str) -> None:
        """Declare the engine dead: fail all pending requests and stop the workers."""
        with self._lock:
            if self._closing:  # or dead already
                return
            self.dead_reason, self._closing = reason, True
        self._end(lambda: errors.EngineDead(f"the engine is dead: {reason}"))
        self._on_dead(reason)


class Watchdog:
    """Notices a run of the engine that hangs: one that takes far longer than predicted.

    Looks are counted, not seconds: time in which the process was stopped, or the machine, does not
    count. Example: a run is predicted to take 0.2 s, and the margin is 8 s. The limit is 10 s, and
    a look comes every 2 s, so the sixth look finds that the run hangs.

    Args:
        margin_s: seconds that a run may take beyond ten times its predicted time.
        on_hang: called once with the reason, on the thread of `watch`.
    """

    def __init__(
        self, margin_s: float, on_hang: Callable[[str], None], clock: Clock = CLOCK
    ) -> None:
        self._margin_s, self._period_s = margin_s, margin_s / 4
        self._on_hang = on_hang
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[int, tuple[float, float]] = {}  # by worker: the limit, and what is left
        self.ended = threading.Event()

    @contextmanager
    def run(self, worker: int, predicted_s: float | None) -> Iterator[None]:
        """Watch a worker's run in the context; a prediction of None: no run was measured yet."""
        limit_s = 10 * (6.0 if predicted_s is None else predicted_s) + self._margin_s
        with self._lock:
            self._runs[worker] = limit_s, limit_s
        try:
            yield
        finally:
            with self._lock:
                self._runs.pop(worker, None)  # a run of one half of the batch has ended it

    def watch(self) -> None:
        """Watch the runs until one hangs, or until `ended` is set."""
        while not self._clock.wait(self.ended, self._period_s):
            with self._lock:
                hung = [limit_s for limit_s, left_s in self._runs.values() if left_s <= 0]
                for worker, (limit_s, left_s) in self._runs.items():
                    self._runs[worker] = limit_s, left_s - self._period_s
            if hung:
                self._on_hang(f"a run took longer than {hung[0]:.1f} s")
                return
