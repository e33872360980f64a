"""How long do short texts wait for long ones? The real scheduler, on workers in virtual time.

    python bench/studies/tail.py

The scheduler chooses each batch. A run takes as long as a cost model says, so the processor does
not limit the simulation, and the figures are the same everywhere. Arrivals come at a share of the
rate of a closed loop with 32 clients, which is simulated first.
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from cloze.bench.load import poisson
from cloze.bench.run import length_class
from cloze.bench.texts import make_texts
from cloze.model_store.batch import Encoding
from cloze.service.batching.cost import BatchCostModel
from cloze.service.batching.scheduler import QueuedEncoding, Scheduler, SchedulerLimits
from cloze.service.fake_engine import FakeEngine

_COSTS = {
    "fp32": BatchCostModel(2.9e-3, 0.185e-3, 80e-9),
    "int8": BatchCostModel(1.2e-3, 0.096e-3, 80e-9),
}
"""all-MiniLM-L6-v2 on one core of a Xeon at 2.8 GHz; bench/results/lone-batch-cpu.md."""

_ALONE = {"fp32": 0.65, "int8": 0.9}
"""Duration of a run on both cores, over that on one core."""

_WORKERS, _CLIENTS, _SHARE = 2, 32, 0.7
_TOKENS_PER_WORD = 1.35


class Simulation:
    """Workers in virtual time, which take their batches from a scheduler without threads.

    Args:
        precision: key of the costs.
        limits: of the scheduler; it has no threads of its own.
    """

    def __init__(self, precision: str, limits: SchedulerLimits) -> None:
        self._cost, self._alone = _COSTS[precision], _ALONE[precision]
        self._scheduler = Scheduler(FakeEngine(), limits)
        self._idle = _WORKERS
        self._order = itertools.count()
        # (time, order, what happened: a finished batch, or the lengths that arrive)
        self._events: list[tuple[float, int, list[QueuedEncoding] | int]] = []
        self._arrived: dict[int, float] = {}
        self.latencies: dict[int, list[float]] = defaultdict(list)

    def run(self, arrivals: Iterator[tuple[float, int]], *, closed: bool) -> float:
        """Simulate the arrivals of texts, and return the time of the last answer.

        Args:
            arrivals: time and length of each text.
            closed: take the next text when one is answered, and ignore the other times.
        """
        for time, length in itertools.islice(arrivals, _CLIENTS if closed else None):
            heapq.heappush(self._events, (time, next(self._order), length))
        now = 0.0
        while self._events:
            now, _, event = heapq.heappop(self._events)
            if isinstance(event, int):
                self._submit(now, event)
            else:
                self._idle += 1
                for queued in event:
                    self.latencies[queued.tokens].append(now - self._arrived.pop(queued.serial))
                    if closed and (following := next(arrivals, None)):
                        self._submit(now, following[1])
            self._start_runs(now)
        self._scheduler.close()
        return now

    def _submit(self, now: float, length: int) -> None:
        self._arrived[self._scheduler._serial] = now
        ids = np.zeros(length, np.int32)
        self._scheduler.submit([Encoding(ids, ids, {})], math.inf)

    def _start_runs(self, now: float) -> None:
        scheduler = self._scheduler
        while self._idle and scheduler._groups:
            self._idle -= 1
            scheduler._idle_workers = self._idle
            batch = scheduler._take_now()
            is_alone = self._idle == _WORKERS - 1 and not scheduler._groups
            seconds = self._seconds([queued.tokens for queued in batch])
            seconds *= self._alone if is_alone else 1
            scheduler._deliver(batch, [{} for _ in batch], sum(q.tokens for q in batch) / seconds)
            heapq.heappush(self._events, (now + seconds, next(self._order), batch))

    def _seconds(self, tokens: Sequence[int]) -> float:
        cost = self._cost
        squares = sum(n * n for n in tokens)
        return cost.fixed + cost.per_token * sum(tokens) + cost.per_square * squares


def _lengths(mix: str, count: int) -> list[int]:
    """Return lengths in tokens."""
    texts = make_texts(["word"], count, mix).texts
    return [min(512, round(len(text.split()) * _TOKENS_PER_WORD) + 2) for text in texts]


def measure(mix: str, precision: str, count: int = 20_000, **limits: float) -> None:
    """Print a row per class of length."""
    lengths = _lengths(mix, count)
    whole = SchedulerLimits(0, max_queue_tokens=10**9, stall_timeout_s=60, **limits)  # type: ignore[arg-type]
    closed = Simulation(precision, whole)
    rate = count / closed.run(zip(itertools.repeat(0.0), lengths), closed=True)
    times = poisson(_SHARE * rate, count / (_SHARE * rate)).tolist()
    opened = Simulation(precision, whole)
    opened.run(zip(times, lengths), closed=False)
    by_class: dict[str, list[float]] = defaultdict(list)
    for length, latencies in opened.latencies.items():
        by_class[length_class(length)] += latencies
    setting = ", ".join(f"{name} {value:g}" for name, value in limits.items())
    for name in ("to 32 tokens", "to 128 tokens", "above 128 tokens"):
        if found := by_class.get(name):
            p50, p99 = np.percentile(np.array(found) * 1e3, [50, 99])
            figures = f"{p50:.1f} | {p99:.1f} | {p99 / p50:.1f}"
            print(f"| {mix} | {precision} | {setting} | {rate:.0f} | {name} | {figures} |")


if __name__ == "__main__":
    print("| texts | graph | limits | texts/s | class | p50 ms | p99 ms | p99 / p50 |")
    print("|---|---|---|---|---|---|---|---|")
    for mix, precision, tokens in itertools.product(
        ("mixed", "questions", "passages"), _COSTS, (512, 256, 128, 64)
    ):
        measure(mix, precision, max_batch_tokens=tokens)
