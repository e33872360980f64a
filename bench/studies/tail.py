"""How long do short texts wait for long ones? The queue of the scheduler, in virtual time.

    python bench/studies/tail.py

The queue chooses each batch. A run takes as long as a cost model says, and the processor is not
needed, so the figures are the same on every machine. Runs share two cores, as threads do. Texts
arrive at a share of the rate of a closed loop with 32 clients, which is simulated first.
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cloze.bench.load import poisson
from cloze.bench.run import length_class
from cloze.bench.texts import make_texts
from cloze.model_store.batch import Encoding
from cloze.service.batching import client_queue
from cloze.service.batching.client_queue import PendingRequest, QueuedEncoding
from cloze.service.batching.cost import BatchCostModel
from cloze.service.batching.fair_queue import FairQueue

_COSTS = {
    "fp32": BatchCostModel(2.9e-3, 0.185e-3, 80e-9),
    "int8": BatchCostModel(1.2e-3, 0.096e-3, 80e-9),
}
"""all-MiniLM-L6-v2 on one core of a Xeon at 2.8 GHz; bench/results/lone-batch-cpu.md."""

_ALONE = {"fp32": 0.65, "int8": 0.9}
"""Duration of a run on both cores, over that on one core."""

_CORES, _CLIENTS, _SHARE, _COUNT = 2, 32, 0.7, 20_000
_TOKENS_PER_WORD = 1.35


@dataclass(frozen=True, slots=True)
class Policy:
    """What is compared.

    Attributes:
        name: in the table.
        max_tokens: most tokens of a batch.
        own_share: see `client_queue`.
        short_worker: whether a worker for short texts runs while all others run long ones.
    """

    name: str
    max_tokens: int = 512
    own_share: float = 0.0
    short_worker: bool = False


@dataclass(slots=True)
class _Run:
    """A batch that runs: the seconds that are left on a core of its own."""

    left_s: float
    batch: list[QueuedEncoding]
    is_extra: bool

    @property
    def tokens(self) -> int:
        return self.batch[0].tokens


class Simulation:
    """Workers in virtual time.

    Args:
        precision: key of the costs.
        policy: what they do.
    """

    def __init__(self, precision: str, policy: Policy) -> None:
        self._cost, self._alone, self._policy = _COSTS[precision], _ALONE[precision], policy
        client_queue._OWN_SHARE = policy.own_share
        self._queue = FairQueue(varlen=False, max_dropped_tokens=10**9)
        self._runs: list[_Run] = []
        self._arrived: dict[PendingRequest, float] = {}
        self.latencies: dict[int, list[float]] = defaultdict(list)

    def run(self, arrivals: Iterator[tuple[float, int]], *, closed: bool) -> float:
        """Simulate the arrivals of texts, and return the time of the last answer.

        Args:
            arrivals: time and length of each text, in order.
            closed: take the next text when one is answered, and ignore the other times.
        """
        waiting = list(itertools.islice(arrivals, _CLIENTS if closed else None))
        heapq.heapify(waiting)
        now = 0.0
        while waiting or self._runs:
            speed = min(1.0, _CORES / max(1, len(self._runs)))
            first = min(self._runs, key=lambda run: run.left_s, default=None)
            end = now + first.left_s / speed if first else math.inf
            arrival = waiting[0][0] if waiting else math.inf
            for run in self._runs:
                run.left_s -= (min(end, arrival) - now) * speed
            now = min(end, arrival)
            if arrival <= end or first is None:
                self._submit(now, heapq.heappop(waiting)[1])
            else:
                self._runs.remove(first)
                for queued in first.batch:
                    self._answer(now, queued)
                    if closed and (following := next(arrivals, None)):
                        self._submit(now, following[1])
            while begun := self._next_run():
                self._runs.append(begun)
        return now

    def _submit(self, now: float, length: int) -> None:
        ids = np.zeros(length, np.int32)
        request = self._queue.add([Encoding(ids, ids, {})], [length], math.inf, "")
        self._arrived[request] = now

    def _answer(self, now: float, queued: QueuedEncoding) -> None:
        self._queue.forget(queued.request)
        self.latencies[queued.tokens].append(now - self._arrived.pop(queued.request))

    def _next_run(self) -> _Run | None:
        """Return the run that a free worker begins now, if there is one."""
        longest = self._policy.max_tokens
        busy = [run for run in self._runs if not run.is_extra]
        if not self._queue:
            return None
        if len(busy) < _CORES:
            batch = self._queue.take(longest, takers=_CORES - len(busy)).batch
            seconds = self._seconds([queued.tokens for queued in batch])
            seconds *= self._alone if not self._runs and not self._queue else 1
            return _Run(seconds, batch, is_extra=False)
        has_extra = len(self._runs) > len(busy) or not self._policy.short_worker
        if has_extra or min(run.tokens for run in busy) <= longest:
            return None
        if not self._queue.has_up_to(longest):
            return None
        batch = self._queue.take(longest, longest=longest).batch
        return _Run(self._seconds([queued.tokens for queued in batch]), batch, is_extra=True)

    def _seconds(self, tokens: Sequence[int]) -> float:
        cost = self._cost
        squares = sum(n * n for n in tokens)
        return cost.fixed + cost.per_token * sum(tokens) + cost.per_square * squares


def _lengths(mix: str, count: int) -> list[int]:
    """Return lengths in tokens."""
    texts = make_texts(["word"], count, mix).texts
    return [min(512, round(len(text.split()) * _TOKENS_PER_WORD) + 2) for text in texts]


def measure(mix: str, precision: str, policy: Policy, count: int = _COUNT) -> list[str]:
    """Return the rate of the closed loop, then p50, p99 and their ratio per class of length."""
    lengths = _lengths(mix, count)
    closed = Simulation(precision, policy)
    rate = count / closed.run(((0.0, length) for length in lengths), closed=True)
    times = poisson(_SHARE * rate, count / (_SHARE * rate)).tolist()
    opened = Simulation(precision, policy)
    opened.run(zip(times, lengths, strict=False), closed=False)
    by_class: dict[str, list[float]] = defaultdict(list)
    for length, latencies in opened.latencies.items():
        by_class[length_class(length)] += latencies
    cells = [f"{rate:.0f}"]
    for name in ("to 32 tokens", "to 128 tokens", "above 128 tokens"):
        p50, p99 = np.percentile(np.array(by_class.get(name, [math.nan])) * 1e3, [50, 99])
        cells.append("" if math.isnan(p50) else f"{p50:.1f}, {p99:.1f}, {p99 / p50:.1f}")
    return cells


_POLICIES = (
    Policy("arrival's tags, 512 tokens"),
    Policy("arrival's tags, 128 tokens", 128),
    Policy("the same, own share 0.25", 128, 0.25),
    Policy("the same, own share 1", 128, 1.0),
    Policy("own share 0, short worker", 128, 0.0, short_worker=True),
    Policy("own share 0.25, short worker", 128, 0.25, short_worker=True),
    Policy("own share 1, short worker", 128, 1.0, short_worker=True),
)

if __name__ == "__main__":
    print("| texts | graph | policy | texts/s | to 32 tokens | to 128 tokens | above 128 |")
    print("|---|---|---|---|---|---|---|")
    for mix, precision in itertools.product(("mixed", "questions", "passages"), _COSTS):
        for policy in _POLICIES:
            cells = [mix, precision, policy.name, *measure(mix, precision, policy)]
            print(f"| {' | '.join(cells)} |", flush=True)
