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
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cloze.bench.load import poisson
from cloze.bench.run import length_class
from cloze.bench.studies.virtual_time import ALONE, COSTS, Workers
from cloze.bench.texts import make_texts
from cloze.model_store.batch import Encoding
from cloze.service.batching.fair_queue import FairQueue, LineKey, PendingRequest, QueuedEncoding
from cloze.service.core import Submission

_CLIENTS, _SHARE, _COUNT = 32, 0.7, 20_000
_TOKENS_PER_WORD = 1.35


@dataclass(frozen=True, slots=True)
class Policy:
    """What is compared.

    Attributes:
        name: in the table.
        max_tokens: most tokens of a batch.
        short_worker: whether a worker for short texts runs while all others run long ones.
    """

    name: str
    max_tokens: int = 512
    short_worker: bool = False


class _Queue(FairQueue):
    """The queue of the scheduler, with a limit of a batch.

    Args:
        max_batch_tokens: most tokens of a batch.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        super().__init__(varlen=False)
        self.max_batch_tokens = max_batch_tokens

    def __bool__(self) -> bool:
        return self.tokens > 0

    def take_batch(self, *, takers: int = 1, longest: int | None = None) -> list[QueuedEncoding]:
        """Remove a batch; see `virtual_time.BatchQueue`."""
        return self.take(self.max_batch_tokens, takers=takers, longest=longest).encodings


class Simulation:
    """Workers in virtual time.

    Args:
        precision: key of the costs.
        policy: what they do.
    """

    def __init__(self, precision: str, policy: Policy) -> None:
        self._queue = _Queue(policy.max_tokens)
        self._workers: Workers[QueuedEncoding] = Workers(
            COSTS[precision], ALONE[precision], short_worker=policy.short_worker
        )
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
        while waiting or self._workers.runs:
            end = now + self._workers.next_end_s()
            arrival = waiting[0][0] if waiting else math.inf
            self._workers.advance(min(end, arrival) - now)
            now = min(end, arrival)
            if arrival <= end:
                self._submit(now, heapq.heappop(waiting)[1])
            else:
                for queued in self._workers.end_first().batch:
                    self._answer(now, queued)
                    if closed and (following := next(arrivals, None)):
                        self._submit(now, following[1])
            while self._workers.begin_run(self._queue):
                pass
        return now

    def _submit(self, now: float, length: int) -> None:
        ids = np.zeros(length, np.int32)
        line = LineKey.of(length, None)
        request = self._queue.add(Submission(math.inf, [Encoding(ids, ids, {})]), line)
        self._arrived[request] = now

    def _answer(self, now: float, queued: QueuedEncoding) -> None:
        self._queue.forget(queued.request)
        self.latencies[queued.tokens].append(now - self._arrived.pop(queued.request))


def text_lengths(mix: str, count: int) -> list[int]:
    """Return the tokens of each of `count` texts; `mix` is a key of `texts.MADE_TEXTS`."""
    texts = make_texts(["word"], count, mix).texts
    return [min(512, round(len(text.split()) * _TOKENS_PER_WORD) + 2) for text in texts]


def measure(mix: str, precision: str, policy: Policy, count: int = _COUNT) -> list[str]:
    """Return the rate of the closed loop, then p50, p99 and their ratio per class of length."""
    lengths = text_lengths(mix, count)
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
    Policy("512 tokens"),
    Policy("128 tokens", 128),
    Policy("128 tokens, short worker", 128, short_worker=True),
)

if __name__ == "__main__":
    print("| texts | graph | policy | texts/s | to 32 tokens | to 128 tokens | above 128 |")
    print("|---|---|---|---|---|---|---|")
    for mix, precision in itertools.product(("mixed", "questions", "passages"), COSTS):
        for policy in _POLICIES:
            cells = [mix, precision, policy.name, *measure(mix, precision, policy)]
            print(f"| {' | '.join(cells)} |", flush=True)
