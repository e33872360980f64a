"""Which metric should scale the replicas? Kubernetes' autoscaler, in virtual time.

    python bench/studies/scaling.py [--arrivals FILE]

Replicas drain their queue at a measured capacity, and refuse what would wait for longer than
CLOZE_MAX_QUEUE_WAIT_MS. Texts flow evenly, so below the capacity nobody waits: the figures compare
rules, and say nothing of latencies below the capacity. The autoscaler is that of Kubernetes: every
15 s it wants ``ceil(replicas * value / target)`` for each metric, and takes the largest; it ignores
differences of 10 %, doubles at most per 15 s, and shrinks by a fifth per minute, to no less than
what any of the last five minutes wanted. A new replica answers after 30 s.

Sources: "Horizontal Pod Autoscaling" of Kubernetes' documentation; `k8s/components/autoscaling`.
"""

import argparse
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cloze.bench.run_options import read_arrivals

CAPACITY: Final = 1896.0
"""Texts per second of a replica with two cores: bench/results/overload-cpu.md, questions, int8."""

MAX_WAIT_S: Final = 1.0
GOOD_S: Final = 0.25

_STEP_S: Final = 0.1
_SYNC_S, _START_S = 15.0, 30.0
_WINDOW_S: Final = 30.0
"""Time over which the largest backlog counts, as in the adapter's rule."""

_LATENCY_WINDOW_S: Final = 60.0
"""Time over which Prometheus takes the p99 of the answers."""

_TOLERANCE: Final = 0.1
_LEAST, _MOST = 2, 10


@dataclass(frozen=True, slots=True)
class Replica:
    """The mean state of the replicas during the last seconds.

    Attributes:
        use: share of the capacity that is used.
        backlogs: largest backlog of each model, in seconds.
        wait_p99: p99 of the wait of answered texts, in seconds.
    """

    use: float
    backlogs: tuple[float, ...]
    wait_p99: float = 0.0


Rule = Callable[[Replica], float]
"""A metric divided by its target: above 1, more replicas are wanted."""


def by_processor(replica: Replica) -> float:
    """Return the use of the processor over its target of 70 %."""
    return replica.use / 0.7


def by_backlog(replica: Replica) -> float:
    """Return the largest backlog of any model over its target of 0.1 s."""
    return max(replica.backlogs) / 0.1


def by_mean_backlog(replica: Replica) -> float:
    """Return the mean backlog of the models over its target of 0.1 s."""
    return sum(replica.backlogs) / len(replica.backlogs) / 0.1


def by_latency(replica: Replica) -> float:
    """Return the p99 of the wait over its target of 0.25 s."""
    return replica.wait_p99 / GOOD_S


def by_all(replica: Replica) -> float:
    """Return the largest of use, backlog and latency, each over its target."""
    return max(by_both(replica), by_latency(replica))


def by_both(replica: Replica) -> float:
    """Return the larger of use and backlog, each over its target."""
    return max(by_processor(replica), by_backlog(replica))


@dataclass(slots=True)
class Outcome:
    """What became of the texts, and what it cost.

    Attributes:
        offered: number of texts.
        good: answered within `GOOD_S`, besides the time of the run itself.
        refused: refused.
        replica_s: seconds of replicas.
        most: most replicas.
        first_late_s: time of the first text that waited for longer than `GOOD_S`; None: none did.
        first_more_s: time at which the autoscaler first wanted more replicas; None: never.
    """

    offered: float = 0.0
    good: float = 0.0
    refused: float = 0.0
    replica_s: float = 0.0
    most: int = 0
    first_late_s: float | None = None
    first_more_s: float | None = None


class Latencies:
    """The waits of the texts that were answered within the last minute."""

    def __init__(self) -> None:
        self._admitted: deque[tuple[float, float, float]] = deque()  # answered at, wait, texts

    def add(self, now: float, wait: float, texts: float) -> None:
        """Note texts that arrive now and will have waited for some seconds."""
        self._admitted.append((now + wait, wait, texts))

    def p99(self, now: float) -> float:
        """Return the p99 of the wait of the texts that were answered until now."""
        while self._admitted and self._admitted[0][0] < now - _LATENCY_WINDOW_S:
            self._admitted.popleft()
        answered = sorted((wait, texts) for at, wait, texts in self._admitted if at <= now)
        above = 0.01 * sum(texts for _, texts in answered)
        for wait, texts in reversed(answered):
            above -= texts
            if above <= 0:
                return wait
        return 0.0


@dataclass(slots=True)
class Autoscaler:
    """The replicas, and the rule by which their number changes.

    Args:
        rule: the metric over its target.
        replicas: number of replicas at first.
    """

    rule: Rule
    replicas: int
    _starting: deque[float] = field(default_factory=deque)  # when each one answers
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)
    _shrunk: float = -60.0

    def running(self, now: float) -> int:
        """Return the number of replicas that answer."""
        while self._starting and self._starting[0] <= now:
            self._starting.popleft()
        return self.replicas - len(self._starting)

    def sync(self, now: float, observed: Replica) -> bool:
        """Change the number of replicas; return whether it grew."""
        ratio = self.rule(observed)
        running = self.running(now)
        wanted = self.replicas if abs(ratio - 1) <= _TOLERANCE else math.ceil(running * ratio)
        wanted = min(max(wanted, _LEAST), _MOST)
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - 300:
            self._wanted.popleft()
        if wanted > self.replicas:
            added = min(wanted, 2 * self.replicas) - self.replicas
            self._starting.extend([now + _START_S] * added)
            self.replicas += added
            return True
        stable = max(number for _, number in self._wanted)
        if stable < self.replicas and now - self._shrunk >= 60 and not self._starting:
            self.replicas = max(stable, math.floor(self.replicas * 0.8))
            self._shrunk = now
        return False


def simulate(rates: NDArray[np.float64], rule: Rule, shares: Sequence[float]) -> Outcome:
    """Return what becomes of texts that arrive at varying rates.

    Args:
        rates: [n] texts per second in each step.
        rule: scales the replicas.
        shares: share of the texts that each model gets; a replica serves all of them at once.
    """
    scaler, outcome = Autoscaler(rule, _LEAST), Outcome()
    backlog = [0.0] * len(shares)
    window: deque[tuple[float, ...]] = deque(maxlen=round(_WINDOW_S / _STEP_S))
    latencies = Latencies()
    uses: deque[float] = deque(maxlen=round(_WINDOW_S / _STEP_S))
    for number, rate in enumerate(rates):
        now = number * _STEP_S
        if number % round(_SYNC_S / _STEP_S) == 0 and window:
            largest = tuple(max(step[m] for step in window) for m in range(len(shares)))
            observed = Replica(sum(uses) / len(uses), largest, latencies.p99(now))
            grew = scaler.sync(now, observed)
            if grew and outcome.first_more_s is None:
                outcome.first_more_s = now
        running = scaler.running(now)
        used = 0.0
        for model, share in enumerate(shares):
            arriving = rate * share * _STEP_S
            own = CAPACITY * running * share  # each model has its share of the workers
            admitted = min(arriving, max(0.0, MAX_WAIT_S - backlog[model]) * own + own * _STEP_S)
            before = backlog[model]
            left = max(0.0, before + admitted / own - _STEP_S)
            used += min(before + admitted / own, _STEP_S) / _STEP_S * share
            backlog[model] = left
            late = max(before, left) > GOOD_S
            latencies.add(now, before, admitted)
            outcome.offered += arriving
            outcome.refused += arriving - admitted
            outcome.good += 0.0 if late else admitted
            if late and outcome.first_late_s is None:
                outcome.first_late_s = now
        window.append(tuple(backlog))
        uses.append(used)
        outcome.replica_s += scaler.replicas * _STEP_S
        outcome.most = max(outcome.most, scaler.replicas)
    return outcome


def ramp(start: float, end: float, minutes: float) -> NDArray[np.float64]:
    """Return a rate that rises for some minutes, stays for ten, and falls in one step."""
    rising = np.linspace(start, end, round(minutes * 60 / _STEP_S))
    return np.concatenate([rising, np.full(round(600 / _STEP_S), end), np.full(6000, start)])


def recorded(file: Path, mean: float) -> NDArray[np.float64]:
    """Return the rates of recorded arrivals, scaled to a mean, over bins of 5 s."""
    times = read_arrivals(file)
    counts, _ = np.histogram(times, np.arange(0, times[-1] + 5, 5))
    return np.repeat(counts * mean / counts.mean(), round(5 / _STEP_S))


_HEADER: Final = """\
| load | scales on | within 0.25 s | refused | replicas, mean / most | more asked for, s | \
first late text, s |
|---|---|---|---|---|---|---|"""


def main() -> None:
    """Simulate, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arrivals", type=Path, help="CSV file with a column 'timestamp'")
    options = parser.parse_args()
    loads: list[tuple[str, NDArray[np.float64], tuple[float, ...]]] = [
        ("1 to 6 times a replica in 10 minutes", ramp(CAPACITY, 6 * CAPACITY, 10), (1.0,)),
        ("1 to 6 times in 1 minute", ramp(CAPACITY, 6 * CAPACITY, 1), (1.0,)),
    ]
    if options.arrivals:
        rates = recorded(options.arrivals, 3 * CAPACITY)
        loads.append(("recorded arrivals, 3 times in the mean", rates, (1.0,)))
    rules = {
        "processor 70 %": by_processor,
        "backlog 0.1 s": by_backlog,
        "latency p99 0.25 s": by_latency,
        "processor and backlog": by_both,
        "all three": by_all,
    }
    print(_HEADER)
    for load, rates, shares in loads:
        for name, rule in rules.items():
            print(_row(load, name, rates, simulate(rates, rule, shares)))
    print("\nOne of four models gets up to five times the texts that it can run:\n")
    print(_HEADER)
    busy = ramp(CAPACITY, 5 * CAPACITY, 1)
    for name, rule in {"mean of the models": by_mean_backlog, "largest": by_backlog}.items():
        print(_row("", name, busy, _one_busy(busy, rule)))


def _one_busy(rates: NDArray[np.float64], rule: Rule) -> Outcome:
    """Return the outcome if only the first of four models has texts."""

    def diluted(observed: Replica) -> float:
        backlogs = (*observed.backlogs, 0.0, 0.0, 0.0)
        return rule(Replica(observed.use, backlogs, observed.wait_p99))

    return simulate(rates, diluted, (1.0,))


def _row(load: str, rule: str, rates: NDArray[np.float64], outcome: Outcome) -> str:
    seconds = len(rates) * _STEP_S
    times = (outcome.first_more_s, outcome.first_late_s)
    first = " | ".join("never" if time is None else f"{time:.0f}" for time in times)
    return (
        f"| {load} | {rule} | {outcome.good / outcome.offered:.1%} "
        f"| {outcome.refused / outcome.offered:.1%} "
        f"| {outcome.replica_s / seconds:.1f} / {outcome.most} | {first} |"
    )


if __name__ == "__main__":
    main()
