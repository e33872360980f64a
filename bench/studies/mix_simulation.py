"""The mix of `mix.py` in virtual time: who is refused, and when does each kind end?

    python -m cloze.bench.studies.mix_simulation [--seconds 120]

The scheduler's own code admits, orders and batches; a run takes as long as a cost model says
(`virtual_time`). So the figures are the same on every machine, and rare loads cost nothing: limits
of time in all mixtures, many clients, clients that come back as they were told.
"""

import argparse
import heapq
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cloze.bench.studies.admission_queues import (
    DEFAULTS,
    MAX_TOKENS,
    Clock,
    StillEngine,
    encoding,
    virtual_time,
)
from cloze.bench.studies.virtual_time import ALONE, CORES, COSTS, Run, Workers
from cloze.service.batching.admission import PromiseKey, Promises, SchedulerLimits, longest_wait_s
from cloze.service.batching.fair_queue import LineKey, QueuedEncoding
from cloze.service.batching.scheduler import Scheduler
from cloze.service.core import Overloaded, Submission

COST, ALONE_FACTOR = COSTS["int8"], ALONE["int8"]


class Kind(NamedTuple):
    """A kind of requests: its share, and what draws the tokens of each text."""

    share: float
    lengths: Callable[[random.Random], list[int]]


KINDS = {
    "question": Kind(0.6, lambda rng: [rng.randint(8, 20)]),
    "list of 32": Kind(0.2, lambda rng: [rng.randint(60, 165) for _ in range(32)]),
    "long QA": Kind(0.1, lambda rng: [384] * 11 + [rng.randint(50, 384)]),
    "fill-mask": Kind(0.1, lambda rng: [rng.randint(12, 28)]),
}


def work_s(lengths: Sequence[int]) -> float:
    """Return the seconds of all cores that a request needs in batches of three texts."""
    each = (COST.fixed / 3 + COST.per_token * n + COST.per_square * n * n for n in lengths)
    return sum(each) / CORES


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives.

    Attributes:
        times: multiples of the capacity.
        stated: time limits of the requests, one at random; None: the request states none.
        clients: number of clients.
        retries: how often a refused request comes back.
    """

    times: float
    stated: tuple[float | None, ...] = (None,)
    clients: int = 1
    retries: int = 0


@dataclass(slots=True, eq=False)
class Arrival:
    """A request that arrives, perhaps again."""

    kind: str
    lengths: list[int]
    client: str
    timeout_s: float | None
    retries: int

    @property
    def line(self) -> LineKey:
        """The line that the request waits in."""
        return LineKey.of(sum(self.lengths), self.timeout_s)


def arrivals(load: Load, seconds: float) -> Iterator[tuple[float, Arrival]]:
    """Yield the times of arrival, in order, and the requests."""
    rng, time = random.Random(1), 0.0
    mean_s = sum(
        kind.share * sum(work_s(kind.lengths(rng)) for _ in range(200)) / 200
        for kind in KINDS.values()
    )
    while (time := time + rng.expovariate(load.times / mean_s)) < seconds:
        name = rng.choices(list(KINDS), [kind.share for kind in KINDS.values()])[0]
        client = f"client {rng.randrange(load.clients)}"
        lengths, timeout_s = KINDS[name].lengths(rng), rng.choice(load.stated)
        yield time, Arrival(name, lengths, client, timeout_s, load.retries)


class _Queue:
    """The queue of a scheduler; see `virtual_time.BatchQueue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def max_batch_tokens(self) -> int:
        return self._scheduler._batch_tokens()

    def __bool__(self) -> bool:
        return self._scheduler._queue.tokens > 0

    def has_up_to(self, length: int) -> bool:
        return self._scheduler._queue.has_up_to(length)

    def take_batch(self, *, takers: int = 1, longest: int | None = None) -> list[QueuedEncoding]:
        return self._scheduler._take_now(takers=takers, longest=longest).encodings


@dataclass
class Outcome:
    """What became of the requests of a kind."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)


class Simulation:
    """A server in virtual time; the caller is inside `virtual_time`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        limits = SchedulerLimits(
            workers=CORES,
            max_batch_tokens=MAX_TOKENS,
            max_queue_tokens=DEFAULTS.max_queue_tokens,
            stall_timeout_s=DEFAULTS.stall_timeout_ms / 1000,
            batch_latency_s=DEFAULTS.batch_latency_ms / 1000,
            max_wait_s=DEFAULTS.max_queue_wait_ms / 1000,
        )
        self._limit_s = limits.max_wait_s
        self._scheduler = Scheduler(StillEngine(), limits)
        self._promises = Promises()
        self._workers: Workers[QueuedEncoding] = Workers(COST, ALONE_FACTOR, short_worker=True)
        self._began: dict[int, float] = {}
        self._serials = itertools.count()
        self._waiting: list[tuple[float, int, Arrival]] = []
        self.outcomes: dict[str, Outcome] = defaultdict(Outcome)
        self.tokens = self.wasted = 0

    def run(self, coming: Iterator[tuple[float, Arrival]]) -> None:
        """Simulate until the last request has ended."""
        for time, arrival in coming:
            self.outcomes[self._label(arrival)].counts["sent"] += 1
            heapq.heappush(self._waiting, (time, next(self._serials), arrival))
        queue, workers, clock = _Queue(self._scheduler), self._workers, self._clock
        while self._waiting or workers.runs:
            end = clock.now + workers.next_end_s()
            due = self._waiting[0][0] if self._waiting else math.inf
            workers.advance(min(end, due) - clock.now)
            clock.now = min(end, due)
            if due <= end:
                self._offer(heapq.heappop(self._waiting)[2])
            else:
                self._end(workers.end_first())
            while workers.begin_run(queue):
                pass
            for run in workers.runs:
                self._began.setdefault(id(run), clock.now)

    @staticmethod
    def _label(arrival: Arrival) -> str:
        stated = arrival.timeout_s
        return arrival.kind if stated is None else f"{arrival.kind}, {stated:g} s"

    def _end(self, run: Run[QueuedEncoding]) -> None:
        seconds = self._clock.now - self._began.pop(id(run))
        tokens = sum(queued.tokens for queued in run.batch)
        self.tokens += tokens
        self._scheduler._deliver(run.batch, [{}] * len(run.batch), seconds)

    def _offer(self, arrival: Arrival) -> None:
        """Decide as the gate and the scheduler do."""
        now, tokens, stated = self._clock.now, sum(arrival.lengths), arrival.timeout_s
        key = PromiseKey("model", arrival.client, arrival.line.patience)
        wait = self._scheduler.expected_wait(arrival.client, tokens, stated)
        limit_s = longest_wait_s(stated, self._limit_s)
        admitted_s = limit_s / 2 if self._promises.outstanding(key, now) else limit_s
        returning = wait.seconds > admitted_s and self._promises.redeem(key, now)
        if wait.seconds > admitted_s and not returning:
            self._refuse(arrival, key, wait.seconds - admitted_s, wait.per_request_s)
            return
        try:
            submission = Submission(
                now + (stated or DEFAULTS.request_timeout_ms / 1000),
                [encoding(length) for length in arrival.lengths],
                arrival.client,
                stated,
                returning=returning,
            )
            future = self._scheduler.submit(submission)
        except Overloaded as error:
            self._refuse(arrival, key, error.retry_after_s, wait.per_request_s)
            return
        outcome = self.outcomes[self._label(arrival)]

        def end(_: object) -> None:
            if future.exception() is None:
                outcome.seconds.append(self._clock.now - now)
            else:
                outcome.counts["late"] += 1
                self.wasted += tokens - getattr(future, "queued_tokens", 0)

        future.add_done_callback(end)

    def _refuse(self, arrival: Arrival, key: PromiseKey, wait_s: float, each_s: float) -> None:
        now = self._clock.now
        after_s = self._promises.promise(key, now, wait_s, each_s)
        if arrival.retries:
            arrival.retries -= 1
            again = now + math.ceil(after_s)
            heapq.heappush(self._waiting, (again, next(self._serials), arrival))
        else:
            self.outcomes[self._label(arrival)].counts["refused"] += 1


def simulate(load: Load, seconds: float) -> Simulation:
    """Return the simulation of a load after its end."""
    clock = Clock()
    with virtual_time(clock):
        simulation = Simulation(clock)
        simulation.run(arrivals(load, seconds))
    return simulation


LOADS = (
    *(Load(times) for times in (1.1, 3.0, 10.0)),
    *(Load(times, (5.0,)) for times in (1.1, 3.0, 10.0)),
    Load(3.0, (2.0, 5.0, None)),
    Load(10.0, (2.0, 5.0, None, 300.0)),
    Load(3.0, clients=20),
    Load(3.0, (5.0,), clients=20),
    Load(3.0, retries=2),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    seconds = parser.parse_args().seconds
    print("| load | kind | sent | answered | refused | late | p50 / p99 s | wasted |")
    print("|---|---|---|---|---|---|---|---|")
    for load in LOADS:
        simulation = simulate(load, seconds)
        name = f"{load.times:g}, {load.clients} clients, {load.retries} retries"
        for kind, outcome in sorted(simulation.outcomes.items()):
            times, counts = sorted(outcome.seconds) or [math.nan], outcome.counts
            print(
                f"| {name} | {kind} | {counts['sent']} | {len(outcome.seconds)} "
                f"| {counts['refused'] / counts['sent']:.1%} | {counts['late']} "
                f"| {times[len(times) // 2]:.2f} / {times[int(len(times) * 0.99)]:.2f} "
                f"| {simulation.wasted / simulation.tokens:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
