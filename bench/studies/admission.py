"""Which requests should an overloaded server admit? Policies of admission, in virtual time.

    python -m cloze.bench.studies.admission [--arrivals FILE] [--texts questions] [--precision int8]

An open loop offers multiples of the capacity: Poisson arrivals, and recorded ones. The capacity is
the rate of a closed loop with 32 clients. The queue forms the batches, and a run takes as long as a
cost model says (`virtual_time`), so the figures are the same on every machine. Requests on the
network, parsing and refusals cost nothing here.
"""

import argparse
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cloze.bench.load import poisson
from cloze.bench.run_options import read_arrivals
from cloze.bench.studies.admission_queues import (
    DEFAULTS,
    AdmissionQueue,
    Clock,
    DroppingQueue,
    Fate,
    OnEnd,
    SchedulerQueue,
    SimulatedRequest,
    virtual_time,
)
from cloze.bench.studies.disciplines import AdaptiveLifo, CoDel, ControlledDelay, FirstInFirstOut
from cloze.bench.studies.tail import text_lengths
from cloze.bench.studies.virtual_time import ALONE, COSTS, Workers
from cloze.service.batching.cost import BatchCostModel

GOOD_S = 2.0
MULTIPLES = (0.7, 1.0, 1.5, 2.0, 5.0, 10.0)
_DETAILED = (1.0, 5.0)
_SECONDS = 20.0
_CONNECTIONS = 32
_TEXTS = 20_000

_HEAVY, _LIGHT = "heavy", "light"
_HEAVY_CONNECTIONS = 200

_RETRY_S = 0.05
"""Time after which a connection of a closed loop asks again if it was refused."""


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """How long runs take.

    Attributes:
        cost: duration of a run on one core.
        alone: factor of the duration of a run that has both cores.
    """

    cost: BatchCostModel
    alone: float

    @property
    def batch_tokens(self) -> int:
        """Most tokens of a batch, as our scheduler chooses them after a while."""
        seconds = DEFAULTS.batch_latency_ms / 1000
        return max(128, min(512, int((seconds - self.cost.fixed) / self.cost.per_token)))


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy of admission: its name, and what makes its queue."""

    name: str
    queue: Callable[[Clock, OnEnd, ServiceModel], AdmissionQueue]


def _dropping(name: str, discipline: Callable[[], FirstInFirstOut]) -> Policy:
    return Policy(
        name,
        lambda clock, on_end, model: DroppingQueue(clock, on_end, discipline(), model.batch_tokens),
    )


def _stated(name: str, stated_s: float) -> Policy:
    return Policy(
        name,
        lambda clock, on_end, _: SchedulerQueue(clock, on_end, stated_s=stated_s, fair_shares=True),
    )


OURS = _stated("expected end, 2 s stated", GOOD_S)
TOKENS = Policy("262,144 tokens", lambda clock, on_end, _: SchedulerQueue(clock, on_end))
NO_LIMIT = Policy(
    "no limit",
    lambda clock, on_end, _: SchedulerQueue(
        clock, on_end, max_queue_tokens=10**12, timeout_s=math.inf
    ),
)
LIFO = _dropping("adaptive LIFO, 100 ms", lambda: AdaptiveLifo(0.1))
CODEL = _dropping("CoDel, 5 and 100 ms", lambda: CoDel(0.005, 0.1))
CONTROLLED = _dropping("controlled delay, 5 and 100 ms", lambda: ControlledDelay(0.005, 0.1))
POLICIES = (
    OURS,
    _stated("expected end, 500 ms stated", 0.5),
    TOKENS,
    CODEL,
    _dropping("CoDel, 100 and 100 ms", lambda: CoDel(0.1, 0.1)),
    CONTROLLED,
    _dropping("controlled delay, 100 and 100 ms", lambda: ControlledDelay(0.1, 0.1)),
    LIFO,
    NO_LIMIT,
)


class Simulation:
    """A server with a policy, in virtual time.

    Args:
        policy: of its queue.
        model: of its runs.
        clock: the virtual time; the caller is inside `virtual_time`.

    Attributes:
        requests: all that arrived.
    """

    def __init__(self, policy: Policy, model: ServiceModel, clock: Clock) -> None:
        self._clock = clock
        self._queue = policy.queue(self._clock, self._end, model)
        self._workers: Workers[SimulatedRequest] = Workers(
            model.cost, model.alone, short_worker=True
        )
        self._arrivals: list[tuple[float, int, SimulatedRequest]] = []
        self._serials = itertools.count()
        self._lengths: dict[str, Iterator[int]] = {}
        self._closed_until = 0.0
        self.requests: list[SimulatedRequest] = []

    def open_loop(self, times: Sequence[float], lengths: Sequence[int]) -> None:
        """Simulate texts that arrive at times, until the last one has ended."""
        for time, length in zip(times, itertools.cycle(lengths), strict=False):
            self._expect(SimulatedRequest("", length, time))
        self._run()

    def closed_loop(
        self, connections: dict[str, int], lengths: Sequence[int], seconds: float
    ) -> None:
        """Simulate clients whose connections ask again when they have an answer.

        Args:
            connections: number of connections by client.
            lengths: of the texts; a client takes them in order, and starts again after the last.
            seconds: time after which no connection asks again.
        """
        self._closed_until = seconds
        for client, count in connections.items():
            self._lengths[client] = itertools.cycle(lengths)
            for _ in range(count):
                self._ask_again(client, 0.0)
        self._run()

    def _ask_again(self, client: str, time: float) -> None:
        if time < self._closed_until:
            self._expect(SimulatedRequest(client, next(self._lengths[client]), time))

    def _expect(self, request: SimulatedRequest) -> None:
        heapq.heappush(self._arrivals, (request.arrived, next(self._serials), request))

    def _run(self) -> None:
        clock, workers = self._clock, self._workers
        while self._arrivals or workers.runs:
            end = clock.now + workers.next_end_s()
            arrival = self._arrivals[0][0] if self._arrivals else math.inf
            now = min(end, arrival)
            workers.advance(now - clock.now)
            clock.now = now
            if arrival <= end:
                self._offer(heapq.heappop(self._arrivals)[2])
            else:
                self._queue.end_run(workers.end_first().batch)
            while workers.begin_run(self._queue):
                pass

    def _offer(self, request: SimulatedRequest) -> None:
        self.requests.append(request)
        if not self._queue.offer(request):
            self._end(request, Fate.REFUSED)

    def _end(self, request: SimulatedRequest, fate: Fate) -> None:
        request.fate, request.ended = fate, self._clock.now
        if request.client:
            delay_s = 0.0 if fate is Fate.ANSWERED else _RETRY_S
            self._ask_again(request.client, self._clock.now + delay_s)


@dataclass(frozen=True, slots=True)
class Figures:
    """What became of the requests of an open loop.

    Attributes:
        good_per_s: answers within `GOOD_S` of the arrival and before the end, per second.
        refused: share of all requests that was refused at the arrival.
        late: share of the accepted requests that was answered later.
        dropped: share of the accepted requests that was dropped.
        p50_s: median wait of the answered requests.
        p99_s: 99th percentile of it.
    """

    good_per_s: float
    refused: float
    late: float
    dropped: float
    p50_s: float
    p99_s: float


def figures(requests: Sequence[SimulatedRequest], seconds: float) -> Figures:
    """Return the figures of requests that arrived within so many seconds."""
    answered = [request for request in requests if request.fate is Fate.ANSWERED]
    dropped = sum(request.fate is Fate.DROPPED for request in requests)
    accepted = max(1, len(answered) + dropped)
    in_time = [request for request in answered if request.ended - request.arrived <= GOOD_S]
    good = sum(request.ended <= seconds for request in in_time)
    waits = [request.started - request.arrived for request in answered] or [math.nan]
    p50_s, p99_s = np.percentile(waits, [50, 99])
    return Figures(
        good / seconds,
        1 - (len(answered) + dropped) / max(1, len(requests)),
        (len(answered) - len(in_time)) / accepted,
        dropped / accepted,
        float(p50_s),
        float(p99_s),
    )


def open_loop(
    policy: Policy, model: ServiceModel, times: Sequence[float], lengths: Sequence[int]
) -> list[SimulatedRequest]:
    """Return the requests of texts that arrive at times; see `Simulation.open_loop`."""
    clock = Clock()
    with virtual_time(clock):
        simulation = Simulation(policy, model, clock)
        simulation.open_loop(times, lengths)
    return simulation.requests


def closed_loop(
    policy: Policy,
    model: ServiceModel,
    connections: dict[str, int],
    lengths: Sequence[int],
    seconds: float = _SECONDS,
) -> list[SimulatedRequest]:
    """Return the requests of clients that wait for answers; see `Simulation.closed_loop`."""
    clock = Clock()
    with virtual_time(clock):
        simulation = Simulation(policy, model, clock)
        simulation.closed_loop(connections, lengths, seconds)
    return simulation.requests


def capacity(model: ServiceModel, lengths: Sequence[int], seconds: float = _SECONDS) -> float:
    """Return the answers per second of a closed loop with 32 connections."""
    return len(closed_loop(OURS, model, {"client": _CONNECTIONS}, lengths, seconds)) / seconds


def recorded(
    arrivals: NDArray[np.float64], rate: float, seconds: float, seed: int = 0
) -> list[float]:
    """Return arrival times whose rate varies as in a recording.

    The recording is scaled to `seconds`, and its rate to a mean of `rate`. Between two recorded
    arrivals, times are uniform, so that a recording of a slow service gives any rate.

    Args:
        arrivals: float64 [n] seconds, ascending.
        rate: mean arrivals per second.
        seconds: duration.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    count = rng.poisson(rate * seconds)
    places = np.sort(rng.uniform(0, len(arrivals) - 1, count))
    times = np.interp(places, np.arange(len(arrivals)), arrivals - arrivals[0])
    return [float(time) for time in times * (seconds / (arrivals[-1] - arrivals[0]))]


def _overload_tables(
    model: ServiceModel, lengths: Sequence[int], times: Callable[[float], Sequence[float]]
) -> Iterator[str]:
    """Yield the lines of the table of goodput, then of the details.

    Args:
        model: of the runs.
        lengths: of the texts.
        times: returns arrival times at a rate per second.
    """
    best = capacity(model, lengths)
    yield f"Capacity {best:.0f} per second. Answers within {GOOD_S:g} s, as a share of it, by load:"
    yield ""
    yield f"| policy | {' | '.join(f'{multiple:g}' for multiple in MULTIPLES)} |"
    yield "|---|" + "---|" * len(MULTIPLES)
    details = []
    for policy in POLICIES:
        cells = []
        for multiple in MULTIPLES:
            arrivals = times(multiple * best)
            found = figures(open_loop(policy, model, arrivals, lengths), _SECONDS)
            cells.append(f"{found.good_per_s / best:.2f}")
            if multiple in _DETAILED:
                details.append(
                    f"| {multiple:g} | {policy.name} | {found.refused:.0%} | {found.late:.0%} "
                    f"| {found.dropped:.0%} | {found.p50_s * 1e3:.0f} | {found.p99_s * 1e3:.0f} |"
                )
        yield f"| {policy.name} | {' | '.join(cells)} |"
    yield ""
    yield "| load | policy | refused at once | late | dropped | p50 wait, ms | p99 wait, ms |"
    yield "|---|---|---|---|---|---|---|"
    yield from sorted(details, key=lambda line: float(line.split()[1]))


def _fairness_table(model: ServiceModel, lengths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of the table of a light client beside a heavy one."""
    alone = _answers(closed_loop(OURS, model, {_LIGHT: 1}, lengths), _LIGHT)
    yield "| policy | light client, of its rate alone | p99, ms | refused or dropped | heavy, /s |"
    yield "|---|---|---|---|---|"
    for policy in POLICIES:
        connections = {_HEAVY: _HEAVY_CONNECTIONS, _LIGHT: 1}
        requests = closed_loop(policy, model, connections, lengths)
        answers, heavy = _answers(requests, _LIGHT), _answers(requests, _HEAVY)
        failed = sum(
            request.client == _LIGHT and request.fate is not Fate.ANSWERED for request in requests
        )
        p99_s = np.percentile(answers or [math.nan], 99)
        yield (
            f"| {policy.name} | {len(answers) / len(alone):.2f} | {p99_s * 1e3:.0f} | {failed} "
            f"| {len(heavy) / _SECONDS:.0f} |"
        )


def _answers(requests: Sequence[SimulatedRequest], client: str) -> list[float]:
    """Return the seconds of each answer of a client."""
    return [
        request.ended - request.arrived
        for request in requests
        if request.client == client and request.fate is Fate.ANSWERED
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--arrivals", type=Path, help="CSV file with a column 'timestamp'")
    parser.add_argument("--texts", nargs="+", default=["questions", "passages"])
    parser.add_argument("--precision", choices=COSTS, default="int8")
    for name, unit in (("fixed", "ms"), ("per-token", "us"), ("per-square", "ns")):
        parser.add_argument(f"--{name}-{unit}", type=float, help="of a batch; replaces the default")
    options = parser.parse_args()
    cost = COSTS[options.precision]
    model = ServiceModel(
        BatchCostModel(
            cost.fixed if options.fixed_ms is None else options.fixed_ms / 1e3,
            cost.per_token if options.per_token_us is None else options.per_token_us / 1e6,
            cost.per_square if options.per_square_ns is None else options.per_square_ns / 1e9,
        ),
        ALONE[options.precision],
    )
    kinds: dict[str, Callable[[float], Sequence[float]]] = {
        "Poisson": lambda rate: poisson(rate, _SECONDS).tolist()
    }
    if options.arrivals:
        recording = read_arrivals(options.arrivals)
        kinds["recorded"] = lambda rate: recorded(recording, rate, _SECONDS)
    for texts in options.texts:
        lengths = text_lengths(texts, _TEXTS)
        for kind, times in kinds.items():
            print(f"\n## {texts.capitalize()}, {kind} arrivals\n")
            for line in _overload_tables(model, lengths, times):
                print(line, flush=True)
        print(
            f"\n## {texts.capitalize()}: a light client beside {_HEAVY_CONNECTIONS} connections\n"
        )
        for line in _fairness_table(model, lengths):
            print(line, flush=True)


if __name__ == "__main__":
    main()
