"""The scheduler of one model: queues encodings, and runs them in batches on worker threads.

The scheduler is work-conserving and late-binding: an idle worker takes a batch at once, and no
request waits for a batch to fill. All encodings of a batch have the same length, so that a batch
needs no padding. If the engine supports variable-length batches, the lengths may differ.

The order is fair queueing over tokens (Demers et al. 1989). The tag of an encoding is the virtual
time of its request's arrival plus the number of tokens before the encoding in the same request.
The encoding with the smallest tag runs next, with others of the same length. Virtual time advances
by the number of tokens that each pending request would have received if all pending requests were
served at once. As a result, a single text does not wait behind a bulk request, and a bulk request
does not wait forever behind single texts.
"""

import heapq
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.service.batching.activity import Activity
from cloze.service.core import (
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
"""Weight of the newest batch in the exponential moving average of tokens per second."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of a scheduler.

    Attributes:
        workers: number of threads that run batches.
        max_batch_tokens: most tokens per batch; a longer single encoding runs alone.
        max_queue_tokens: most tokens that may wait. An empty queue admits a request of any size.
        stall_timeout_s: seconds after which a run means that the engine hangs.
    """

    workers: int
    max_batch_tokens: int
    max_queue_tokens: int
    stall_timeout_s: float


class PendingRequest(Future[BatchResult]):
    """The future of a request, with the outputs that have arrived.

    Args:
        encodings: number of encodings.
        tokens: number of tokens of all encodings.
        deadline: `time.monotonic` time after which no encoding starts.

    Attributes:
        deadline: `time.monotonic` time after which no encoding starts.
        submitted: `time.monotonic` time of the admission.
        outputs: one element per encoding; None until the encoding has run.
        missing: number of outputs that are None.
        queued_tokens: number of tokens of the encodings that no worker has taken.
        started: `time.monotonic` time at which a worker took the first encoding, or None.
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
    """One queued encoding, ordered by tag.

    The class is a tuple because a heap compares tuples without a call of a Python function.

    Attributes:
        tag: virtual time at which the encoding's turn comes.
        serial: unique number, so that a comparison ends here.
        tokens: length of the encoding.
        vocabulary_rows: number of rows that a head multiplies into the vocabulary.
        encoding: the encoding to run.
        request: the request of the encoding.
        position: index of the encoding in its request.
    """

    tag: float
    serial: int
    tokens: int
    vocabulary_rows: int
    encoding: Encoding
    request: PendingRequest
    position: int


class Scheduler:
    """The queue of one model's requests and the worker threads that run the batches.

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
        # One heap per length, or a single heap with key 0 if the engine supports varlen batches.
        self._groups: dict[int, list[QueuedEncoding]] = {}
        self._pending: set[PendingRequest] = set()
        self._running: dict[int, float] = {}  # number of a worker -> start of its run
        self._queued_tokens = 0
        # Upper bound on the tokens of ended requests in the groups.
        self._dropped_tokens = 0
        self._virtual_time = 0.0
        self._serial = 0
        self._idle_workers = 0
        self._tokens_per_s = 0.0  # mean rate of one worker
        self._draining = False
        self._dead: str | None = None
        self._closing = False

        self._ended = threading.Event()  # ends the watchdog
        self._workers = [
            _thread(partial(self._work, number), f"worker-{number}")
            for number in range(limits.workers)
        ]
        self._watchdog = _thread(self._watch, "watchdog")
        for thread in (*self._workers, self._watchdog):
            thread.start()

    @property
    def queued_tokens(self) -> int:
        """Number of tokens that wait."""
        return self._queued_tokens

    @property
    def dead(self) -> str | None:
        """Why the engine is dead; None while the engine works."""
        return self._dead

    @property
    def draining(self) -> bool:
        """Whether the scheduler refuses new requests."""
        return self._draining

    def submit(
        self, encodings: Sequence[Encoding], deadline: float, *, accepted: bool = False
    ) -> Future[BatchResult]:
        """Admit all encodings of a request or none; see `core.Queue`."""
        lengths = list(map(len, encodings))
        tokens = sum(lengths)
        with self._lock:
            self._check_admission(tokens, accepted=accepted)
            request = PendingRequest(len(encodings), tokens, deadline)
            self._pending.add(request)
            request.add_done_callback(self._forget)
            self._enqueue(request, encodings, lengths)
            self._queued_tokens += tokens
            self._changed.notify(len(encodings))
        return request

    def _check_admission(self, tokens: int, *, accepted: bool) -> None:
        """Raise unless a request of so many tokens may be queued; the caller holds the lock."""
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

    def _enqueue(
        self, request: PendingRequest, encodings: Sequence[Encoding], lengths: Sequence[int]
    ) -> None:
        """Tag the encodings of a request and queue them in groups; the caller holds the lock."""
        tag, varlen = self._virtual_time, self._engine.supports_varlen
        for position, (encoding, length) in enumerate(zip(encodings, lengths, strict=True)):
            group = self._groups.setdefault(0 if varlen else length, [])
            rows = encoding.vocabulary_rows
            queued = QueuedEncoding(tag, self._serial, length, rows, encoding, request, position)
            heapq.heappush(group, queued)
            self._serial += 1
            tag += length

    def drain(self) -> None:
        """Stop admitting requests; admitted requests still run."""
        self._draining = True

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail pending requests and end the threads; see `core.Queue`."""
        self.drain()
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        self._fail_pending(
            lambda: ShuttingDown("the server shut down before this request was answered")
        )
        self._ended.set()
        if self._dead is None:  # the threads of a dead engine may never end
            deadline = time.monotonic() + timeout_s
            for thread in (*self._workers, self._watchdog):
                thread.join(max(0.0, deadline - time.monotonic()))

    def _retry_after_s(self) -> int:
        """Return the seconds that the queued tokens need at the measured rate, at least 1."""
        rate = self._tokens_per_s * len(self._workers)
        return max(1, math.ceil(self._queued_tokens / rate)) if rate else 1

    # ---- worker threads -------------------------------------------------------------------------

    def _work(self, number: int) -> None:
        """Run batches until the scheduler closes."""
        self._activity.begin()
        try:
            while batch := self._take():
                self._run(number, batch)
        except BaseException as error:  # without its worker the service must end too
            self._die(f"a worker ended with {type(error).__name__}")
        finally:
            self._activity.end()

    def _take(self) -> list[QueuedEncoding]:
        """Wait for queued encodings and take a batch; return [] when the scheduler closes."""
        with self._lock:
            while not self._closing:
                if self._groups:
                    if batch := self._take_now():
                        return batch
                else:
                    self._idle_workers += 1
                    self._activity.end()
                    self._changed.wait()
                    self._activity.begin()
                    self._idle_workers -= 1
            return []

    def _take_now(self) -> list[QueuedEncoding]:
        """Take a batch from the group with the smallest tag; the caller holds the lock.

        Returns:
            The batch; [] if all encodings that were looked at belong to ended requests.
        """
        key = min(self._groups, key=lambda key: self._groups[key][0])
        group = self._groups[key]
        self._virtual_time = max(self._virtual_time, group[0].tag)
        batch = self._fill_batch(group, self._share(group))
        if not group:
            self._groups.pop(key, None)  # `_sweep` may have removed the group already
        # Encodings that run before their turn, because they have the length of the batch, delay no
        # other request. Virtual time does not advance for these encodings.
        in_turn = sum(queued.tokens for queued in batch if queued.tag <= self._virtual_time)
        self._virtual_time += in_turn / max(1, len(self._pending))
        return batch

    def _share(self, group: list[QueuedEncoding]) -> int:
        """Return the most encodings that a worker takes from a group.

        Idle workers get equal shares. An engine that supports variable-length batches runs one
        batch at a time, and its other worker only packs the next batch. That engine gets all.
        """
        if self._engine.supports_varlen:
            return len(group)
        return math.ceil(len(group) / (self._idle_workers + 1))

    def _fill_batch(self, group: list[QueuedEncoding], share: int) -> list[QueuedEncoding]:
        """Move encodings from a group to a batch until the batch is full."""
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
            if self._start_unless_ended(queued, now):
                batch.append(queued)
                tokens += queued.tokens
        return batch

    def _is_full(self, tokens: int, vocabulary_rows: int, cells: int) -> bool:
        """Return whether a batch of this size exceeds a limit; ``cells`` include padding."""
        limit = self._limits.max_batch_tokens
        return (
            tokens > limit
            or vocabulary_rows > MAX_BATCH_VOCABULARY_ROWS
            or cells > MAX_PADDING_FACTOR * limit
        )

    def _start_unless_ended(self, queued: QueuedEncoding, now: float) -> bool:
        """Mark the encoding's request as started; return False if the request has ended.

        A request that has passed its deadline ends here.
        """
        request = queued.request
        if request.done():  # cancelled or failed
            return False
        request.queued_tokens -= queued.tokens
        self._queued_tokens -= queued.tokens
        if request.deadline <= now:
            self._finish(request, DeadlineExceeded("the request's time was over before it ran"))
            return False
        if request.started is None:
            request.started = now
        return True

    def _run(self, number: int, batch: list[QueuedEncoding]) -> None:
        """Run a batch. If the engine raises, halve the batch until one failing encoding is left."""
        if self._dead is not None:
            return
        started = time.monotonic()
        with self._lock:
            self._running[number] = started
            alone = self._activity.is_alone and not self._groups
        try:
            encodings = [queued.encoding for queued in batch]
            outputs = self._engine.run(encodings, alone=alone)
        except Exception as error:  # the runtime's errors have no common type
            if len(batch) == 1:
                self._fail_one(batch[0].request, error)
                return
            middle = len(batch) // 2
            for half in (batch[:middle], batch[middle:]):
                self._run(number, half)
            return
        finally:
            with self._lock:
                self._running.pop(number, None)
        seconds = time.monotonic() - started
        tokens = sum(queued.tokens for queued in batch)
        self._on_batch(BatchReport(len(batch), tokens, seconds))
        # Last, because the event loop wakes up and then waits for this thread to be idle.
        self._deliver(batch, outputs, tokens / max(seconds, 1e-9))

    def _deliver(
        self, batch: list[QueuedEncoding], outputs: list[HeadOutputs], tokens_per_s: float
    ) -> None:
        """Store the outputs of a batch, and finish the requests that have all their outputs."""
        complete = []
        with self._lock:
            weight = _RATE_WEIGHT if self._tokens_per_s else 1.0
            self._tokens_per_s += weight * (tokens_per_s - self._tokens_per_s)
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
        """Subtract an ended request from the queue's tokens; called when its future ends.

        The request's encodings stay in their groups until a worker or `_sweep` drops them.
        """
        assert isinstance(request, PendingRequest)
        with self._lock:
            self._pending.discard(request)
            self._queued_tokens -= request.queued_tokens
            self._dropped_tokens += request.queued_tokens
            request.queued_tokens = 0
            if self._dropped_tokens > self._limits.max_queue_tokens:
                self._sweep()
        if request.cancelled():
            request.set_running_or_notify_cancel()  # wakes threads that wait for the future

    def _sweep(self) -> None:
        """Remove the encodings of ended requests from the groups; the caller holds the lock.

        Without a sweep, cancelled requests would occupy unbounded memory.
        """
        self._dropped_tokens = 0
        for key, group in list(self._groups.items()):
            group[:] = [queued for queued in group if not queued.request.done()]
            heapq.heapify(group)
            if not group:
                del self._groups[key]

    # ---- watchdog and failure -------------------------------------------------------------------

    def _watch(self) -> None:
        """Declare the engine dead when a run exceeds the stall timeout."""
        timeout_s = self._limits.stall_timeout_s
        left_s = timeout_s
        while not self._ended.wait(left_s):
            with self._lock:
                oldest = min(self._running.values(), default=None)
            left_s = timeout_s if oldest is None else oldest + timeout_s - time.monotonic()
            if left_s <= 0:
                self._die(f"a run took longer than {timeout_s:g} s")
                return

    def _die(self, reason: str) -> None:
        """Declare the engine dead: fail all pending requests and stop the workers."""
        with self._lock:
            if self._dead is not None or self._closing:
                return
            self._dead = reason
            self._closing = True
            self._changed.notify_all()
        self._ended.set()
        self._fail_pending(lambda: EngineDead(f"the engine is dead: {reason}"))
        self._on_dead(reason)

    def _fail_pending(self, make_error: Callable[[], ServiceError]) -> None:
        """Clear the queue, and fail every pending request with an error of its own."""
        with self._lock:
            pending = list(self._pending)
            self._groups.clear()
        for request in pending:
            self._finish(request, make_error())


def _thread(target: Callable[[], None], name: str) -> threading.Thread:
    return threading.Thread(target=target, name=name, daemon=True)
