"""A scheduler whose workers a test moves step by step, in one thread.

The workers are states, not threads: a worker looks for a batch, waits, or holds a batch that it
runs at a later step. So a test decides the order of all steps, and every order is the same each
time.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from cloze.service.batching.admission import SchedulerLimits
from cloze.service.batching.fair_queue import Batch, QueuedEncoding
from cloze.service.batching.scheduler import Scheduler
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import BatchFill
from tests.support.fake_engine import FakeEngine


class Waits(Exception):
    """A worker has found nothing to do, and waits for a condition."""


class Condition(threading.Condition):
    """A condition that records which worker waits, and wakes the first ones in their order."""

    def __init__(self, lock: threading.RLock) -> None:  # type: ignore[valid-type]
        super().__init__(lock)
        self.waiting: list[Worker] = []

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self.waiting))):
            self.waiting.pop(0).condition = None

    def notify_all(self) -> None:
        self.notify(len(self.waiting))


@dataclass(eq=False)
class Worker:
    """A worker thread as a state: what the worker holds, or what it waits for.

    `take` waits for a batch and returns it, or None when the scheduler closes. If `was_idle`, the
    scheduler counts the worker as idle until the worker looks again.
    """

    number: int
    take: Callable[[], Batch | None]
    batch: list[QueuedEncoding] = field(default_factory=list)
    condition: Condition | None = None
    was_idle: bool = False
    ended: bool = False

    @property
    def is_free(self) -> bool:
        """Whether the worker can look for a batch now."""
        return not (self.batch or self.condition or self.ended)


class SteppedScheduler(Scheduler):
    """A scheduler without threads; `look` and `run` do the work of a worker.

    The worker for short texts is the last one, and the limits do not count it. `deaths` has the
    reasons that `on_dead` was called with.
    """

    def __init__(self, engine: FakeEngine, limits: SchedulerLimits, clock: Clock = CLOCK) -> None:
        self.deaths: list[str] = []
        super().__init__(engine, limits, on_dead=self.deaths.append, clock=clock)
        self._changed = Condition(self._lock)
        self._short_texts = Condition(self._lock)
        self.workers = [
            Worker(number, lambda number=number: self._take(number))  # type: ignore[misc]
            for number in range(limits.workers)
        ]
        if not engine.supports_varlen:
            self.workers.append(Worker(limits.workers, self._take_short))
        self._looking: Worker | None = None

    def _wait(self, condition: threading.Condition, most_s: float = 0.0) -> None:
        assert isinstance(condition, Condition)
        assert self._looking is not None
        condition.waiting.append(self._looking)
        self._looking.condition = condition
        raise Waits

    def look(self, worker: Worker) -> None:
        """Let a worker look for a batch: the worker then holds one, waits, or has ended."""
        if worker.was_idle:
            self._idle_workers -= 1
        idle = self._idle_workers
        self._looking = worker
        try:
            batch = worker.take()
            worker.batch = batch.encodings if batch else []
            worker.ended = batch is None
        except Waits:
            pass
        finally:
            self._looking = None
            worker.was_idle = self._idle_workers > idle

    def run(self, worker: Worker) -> None:
        """Let a worker run its batch to the end."""
        batch, worker.batch = worker.batch, []
        self._run(worker.number, batch, BatchFill.WAITING)
