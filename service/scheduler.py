"""Decides what runs next. Hides waiting: a request's queries go in at once, one future comes out. Knows no text, no HTTP.

Work-conserving and late-binding: a worker that becomes idle takes what is useful now; nobody waits for a batch to fill.
A batch holds queries of one length, so nothing is padded; of any lengths, if the engine mixes them. Which come next is
settled by fair queueing over tokens (Demers et al. 1989): each query is tagged with the virtual time of its request's
arrival plus the request's tokens before it, and the smallest tag is next, with others of its length. Virtual time
advances by the tokens that each pending request would have been served had they all been served at once. So a single
text does not wait behind a bulk request, and a bulk request does not wait for ever behind single texts.
"""

import heapq
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import NamedTuple

from service.core import (
    CELLS_A_TOKEN,
    MAX_BATCH_MASKS,
    Answer,
    BatchReport,
    DeadlineExceeded,
    Engine,
    EngineDead,
    EngineFailed,
    Output,
    Overloaded,
    Query,
    ServiceError,
    ShuttingDown,
)

_RATE_WEIGHT = 0.1
"""Of the newest batch in the running mean of tokens a second."""


class _Ticket(Future[Answer]):
    """A request's future, and what it still waits for.

    Attributes:
        outputs: of its queries, None until they ran.
        missing: how many are None.
        queued_tokens: of its queries that no worker has taken.
        started: when its first query was taken; None until then.
    """

    def __init__(self, queries: int, tokens: int, deadline: float) -> None:
        super().__init__()
        self.deadline = deadline
        self.submitted = time.monotonic()
        self.outputs: list[Output | None] = [None] * queries
        self.missing = queries
        self.queued_tokens = tokens
        self.started: float | None = None


class _Entry(NamedTuple):
    """One queued query. Ordered by turn, and as a tuple: heaps compare it without calling Python."""

    tag: float
    serial: int  # no two have the same, so that nothing after it is compared
    tokens: int
    query: Query
    ticket: _Ticket
    place: int  # among its ticket's


class Scheduler:
    """A queue and the workers that empty it, for one model.

    Args:
        engine: runs batches; called by all workers at once.
        workers: threads, one a core.
        max_batch_tokens: the most a batch may hold; a longer single query runs alone.
        max_queue_tokens: the most that may wait. A request that finds the queue empty is admitted whatever its size.
        stall_timeout_s: a run that takes longer means that the engine is dead.
        on_batch: told of each run, on a worker's thread.
        on_dead: told once, on any thread, that the engine is dead.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        workers: int,
        max_batch_tokens: int,
        max_queue_tokens: int,
        stall_timeout_s: float,
        on_batch: Callable[[BatchReport], None] = lambda _: None,
        on_dead: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._max_batch_tokens = max_batch_tokens
        self._max_queue_tokens = max_queue_tokens
        self._stall_timeout_s = stall_timeout_s
        self._on_batch = on_batch
        self._on_dead = on_dead

        self._changed = threading.Condition()  # guards all below
        self._groups: dict[int, list[_Entry]] = {}  # by length, or all in one, each a heap by turn
        self._tickets: set[_Ticket] = set()
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
            threading.Thread(target=self._work, args=(number,), name=f"worker-{number}", daemon=True) for number in range(workers)
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

    def submit(self, queries: Sequence[Query], deadline: float, *, accepted: bool = False) -> Future[Answer]:
        """See `core.Queue`."""
        lengths = list(map(len, queries))
        tokens = sum(lengths)
        with self._changed:
            if self._dead is not None:
                raise EngineDead(f"the engine is dead: {self._dead}")
            if self._closing or (self._draining and not accepted):
                raise ShuttingDown("the server is shutting down")
            if self._queued_tokens and self._queued_tokens + tokens > self._max_queue_tokens:
                raise Overloaded(
                    f"the queue holds {self._queued_tokens} tokens; with this request's {tokens} "
                    f"it would pass its limit of {self._max_queue_tokens}",
                    self._retry_after_s(),
                )
            ticket = _Ticket(len(queries), tokens, deadline)
            self._tickets.add(ticket)
            ticket.add_done_callback(self._forget)
            tag, mixed = self._virtual_time, self._engine.mixes_lengths
            for index, (query, length) in enumerate(zip(queries, lengths, strict=True)):
                group = self._groups.setdefault(0 if mixed else length, [])
                heapq.heappush(group, _Entry(tag, self._serial, length, query, ticket, index))
                self._serial += 1
                tag += length
            self._queued_tokens += tokens
            self._changed.notify(len(queries))
        return ticket

    def drain(self) -> None:
        """Admit nothing more; what was admitted runs on."""
        self._draining = True

    def close(self, timeout_s: float = 5.0) -> None:
        """See `core.Queue`."""
        self.drain()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._fail_pending(lambda: ShuttingDown("the server shut down before this request was answered"))
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
        except BaseException as error:  # whatever ends a worker ends the service, not just the thread
            self._die(f"a worker ended with {type(error).__name__}")

    def _take(self) -> list[_Entry]:
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

    def _take_now(self) -> list[_Entry]:
        """The queries of one group whose turn it is, the dropped ones left out; the lock is held."""
        key = min(self._groups, key=lambda key: self._groups[key][0])
        group = self._groups[key]
        self._virtual_time = max(self._virtual_time, group[0].tag)
        # Leave the idle workers theirs; but a device that mixes lengths runs one batch at a time, and they only pack the next.
        share = len(group) if self._engine.mixes_lengths else math.ceil(len(group) / (self._idle + 1))
        batch: list[_Entry] = []
        tokens = masks = longest = 0
        now = time.monotonic()
        while group and len(batch) < share:
            query, length = group[0].query, group[0].tokens
            masks += len(query.masks)
            longest = max(longest, length)
            too_many = tokens + length > self._max_batch_tokens or masks > MAX_BATCH_MASKS
            if batch and (too_many or (len(batch) + 1) * longest > CELLS_A_TOKEN * self._max_batch_tokens):
                break
            entry = heapq.heappop(group)
            ticket = entry.ticket
            if ticket.done():  # cancelled, or failed already
                continue
            ticket.queued_tokens -= length
            self._queued_tokens -= length
            if ticket.deadline <= now:
                self._finish(ticket, DeadlineExceeded("the request's time was over before it ran"))
                continue
            if ticket.started is None:
                ticket.started = now
            batch.append(entry)
            tokens += length
        if not group:
            self._groups.pop(key, None)  # a sweep may have been quicker
        # Those that ran ahead of their turn, for their length's sake, cost nobody a turn: time does not advance for them.
        in_turn = sum(entry.tokens for entry in batch if entry.tag <= self._virtual_time)
        self._virtual_time += in_turn / max(1, len(self._tickets))
        return batch

    def _run(self, number: int, batch: list[_Entry]) -> None:
        """Run a batch; if the engine raises, halve it until only the guilty query fails."""
        if self._dead is not None:
            return
        started = time.monotonic()
        with self._changed:
            self._running[number] = started
        try:
            outputs = self._engine.run([entry.query for entry in batch])
        except Exception as error:  # the runtime's errors have no common type; each ends in an answer
            if len(batch) > 1:
                middle = len(batch) // 2
                for half in (batch[:middle], batch[middle:]):
                    self._run(number, half)
                return
            self._fail_guilty(batch[0].ticket, error)
            return
        finally:
            with self._changed:
                self._running.pop(number, None)
        seconds = time.monotonic() - started
        tokens = sum(entry.tokens for entry in batch)
        self._deliver(batch, outputs, tokens / max(seconds, 1e-9))
        self._on_batch(BatchReport(len(batch), tokens, 0, seconds))

    def _deliver(self, batch: list[_Entry], outputs: list[Output], tokens_per_s: float) -> None:
        done = []
        with self._changed:
            weight = _RATE_WEIGHT if self._tokens_per_s else 1.0
            self._tokens_per_s += weight * (tokens_per_s - self._tokens_per_s)
            for entry, output in zip(batch, outputs, strict=True):
                ticket = entry.ticket
                ticket.outputs[entry.place] = output
                ticket.missing -= 1
                if not ticket.missing:
                    done.append(ticket)
        for ticket in done:
            self._finish(ticket, None)

    def _fail_guilty(self, ticket: _Ticket, error: Exception) -> None:
        self._finish(ticket, EngineFailed(f"the engine cannot run this input ({type(error).__name__})"))
        try:
            self._engine.probe()
        except Exception as probe_error:  # not the input: the engine itself is broken
            self._die(f"after an error it could not repeat its golden outputs ({type(probe_error).__name__})")

    def _finish(self, ticket: _Ticket, error: ServiceError | None) -> None:
        try:
            if error is not None:
                ticket.set_exception(error)
                return
            assert ticket.started is not None
            outputs = [output for output in ticket.outputs if output is not None]
            done = time.monotonic()
            ticket.set_result(Answer(outputs, ticket.started - ticket.submitted, done - ticket.started))
        except InvalidStateError:
            pass  # it was cancelled, or failed by another thread, a moment ago

    def _forget(self, ticket: Future[Answer]) -> None:
        """Its future has ended: what it still has in the queue waits no more, though it is dropped only when its turn comes."""
        assert isinstance(ticket, _Ticket)
        with self._changed:
            self._tickets.discard(ticket)
            self._queued_tokens -= ticket.queued_tokens
            self._dropped_tokens += ticket.queued_tokens
            ticket.queued_tokens = 0
            if self._dropped_tokens > self._max_queue_tokens:
                self._sweep()
        if ticket.cancelled():
            ticket.set_running_or_notify_cancel()  # tells those who wait on it in other threads

    def _sweep(self) -> None:
        """Take what has ended out of the groups, so that memory is bounded by the queue's limit; the lock is held."""
        self._dropped_tokens = 0
        for length, group in list(self._groups.items()):
            group[:] = [entry for entry in group if not entry.ticket.done()]
            heapq.heapify(group)
            if not group:
                del self._groups[length]

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Declare the engine dead when a run exceeds the stall timeout."""
        wait_s = self._stall_timeout_s
        while not self._ended.wait(wait_s):
            with self._changed:
                oldest = min(self._running.values(), default=None)
            left_s = self._stall_timeout_s if oldest is None else oldest + self._stall_timeout_s - time.monotonic()
            if left_s <= 0:
                self._die(f"a run took longer than {self._stall_timeout_s:g} s")
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
            pending = list(self._tickets)
            self._groups.clear()
        for ticket in pending:
            self._finish(ticket, make_error())
