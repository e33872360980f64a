"""Measures every subject in turn, under every load, on the same texts, and repeats the turns."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cloze.bench.errors import BenchError
from cloze.bench.load import LoadResult, closed_loop, open_loop, poisson, rescaled
from cloze.bench.machine import processor_time, stolen_share
from cloze.bench.parts import parts_ms, scrape
from cloze.bench.processes import RunningServer
from cloze.bench.result import Load, LoadKind, ResourceUsage, ServerStart, Turn, make_turn
from cloze.bench.servers import MeasuredServer
from cloze.bench.subjects import EngineAlone
from cloze.service.server.startup import run_loop

T = TypeVar("T")

_BULK_TEXTS = 2048
_WARM_UP_S = 1.0
_BULK_LEAD_S = 0.5
"""A bulk request runs this long before the single requests start, and after they end."""

_ATTEMPTS = 4
"""Most runs of a load, on a host whose other guests take too much."""

_CLASSES = (32, 128)
"""Largest lengths of the classes of length, in tokens; one more class has the longer texts."""

Report = Callable[[str], None]
"""Receives the figures, one line each."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The loads of a measurement.

    Attributes:
        clients: of the closed loops, one load each; at least one.
        pauses: milliseconds between an answer and the next request of one client, one load each.
        shares: of the open loops: arrivals per second over the rate of the closed loop with the
            most clients.
        arrivals: recorded arrival times in seconds, float64 [n], replayed at the same shares; None:
            no recording.
        texts_per_request: of all loads.
        bulk: whether to measure single requests beside one client whose bulk requests of 2,048
            texts never stop.
        label: ends the names of all loads, where a result has several plans.
        max_stolen: share of the processor time that other guests of the host may take. A load in
            which they take more runs again, at most three times; the quietest run counts.
    """

    clients: tuple[int, ...] = (1, 32)
    pauses: tuple[float, ...] = ()
    shares: tuple[float, ...] = (0.7,)
    arrivals: NDArray[np.float64] | None = None
    texts_per_request: int = 1
    bulk: bool = True
    seconds: float = 10.0
    turns: int = 3
    label: str = ""
    max_stolen: float = 1.0

    def load(self, kind: LoadKind, number: float | None = None) -> Load:
        """Return a load of this plan."""
        return Load(kind, number, self.label)

    def closed(self, clients: int) -> Load:
        """Return a closed loop."""
        return self.load(LoadKind.CLOSED, clients)


@dataclass(slots=True)
class Measured:
    """What was measured, and a line per server and turn that was left out."""

    turns: list[Turn] = field(default_factory=list)
    starts: list[ServerStart] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def measure(
    engines: Mapping[str, Callable[[], EngineAlone]],
    servers: Sequence[MeasuredServer],
    texts: Sequence[str],
    plan: Plan,
    report: Report,
    lengths: Sequence[int] | None = None,
) -> Measured:
    """Run the plan.

    If a server does not start or exits, the rest of its turn is left out and reported.

    Args:
        engines: by name; each opens one engine.
        servers: measured over HTTP.
        lengths: tokens of each text; with them, latencies are also counted per class of length.
    """
    groups = [length_class(length) for length in lengths] if lengths else [""] * len(texts)
    result = Measured()

    def leave_out(number: int, server: MeasuredServer, reason: object) -> None:
        line = f"turn {number}: {server.name} is left out: {reason}"
        result.left_out.append(line)
        report(line)

    for number in range(plan.turns):
        for name, open_engine in engines.items():
            measured = _measure_engine(name, open_engine(), plan, number)
            result.turns += measured
            _report_turns(measured, report)
        for server in servers:
            if plan.texts_per_request > server.max_texts:
                leave_out(number, server, f"it takes {server.max_texts} texts per request")
                continue
            try:
                with server.start() as process:
                    result.starts.append(
                        ServerStart(server.name, process.ready_s, process.rss_mb())
                    )
                    loads = _ServerLoads(server, process, texts, groups, plan, number)
                    measured = run_loop(loads.measure())
            except BenchError as error:
                leave_out(number, server, error)
            else:
                result.turns += measured
                _report_turns(measured, report)
    return result


def length_class(tokens: int) -> str:
    """Return the name of the class of length of a text."""
    fitting = [limit for limit in _CLASSES if tokens <= limit]
    return f"to {fitting[0]} tokens" if fitting else f"above {_CLASSES[-1]} tokens"


def _report_turns(turns: Sequence[Turn], report: Report) -> None:
    for turn in turns:
        latency = "".join(
            f", {name} {turn.latency_ms[name]:.2f} ms"
            for name in ("p50", "p99")
            if name in turn.latency_ms
        )
        failed = f", failed {turn.failed}" if turn.failed else ""
        title = f"turn {turn.turn}: {turn.load}, {turn.subject}"
        report(f"{title}: {turn.texts_per_s:.1f} texts/s{latency}{failed}")


def _measure_engine(name: str, engine: EngineAlone, plan: Plan, number: int) -> list[Turn]:
    turns = []
    if plan.texts_per_request == 1:  # otherwise no load of the plan sends single texts
        latencies, stolen = _quietest(lambda: engine.single_latencies(plan.seconds), plan)
        count = latencies.get_total_count()
        single = LoadResult(plan.seconds, requests=count, texts=count, latencies=latencies)
        usage = ResourceUsage(stolen=stolen)
        turns.append(make_turn(name, name, plan.closed(1), number, single, usage))
    # One client with single texts gives no batch.
    if plan.texts_per_request > 1 or max(plan.clients) > 1:
        load = plan.closed(max(plan.clients))
        rate, stolen = _quietest(lambda: engine.texts_per_s(plan.seconds), plan)
        turns.append(Turn(name, load.name, number, rate, stolen=stolen, engine=name, arrivals=load))
    return turns


def _quietest(measure_once: Callable[[], T], plan: Plan) -> tuple[T, float]:
    """Measure until other guests take little; return the quietest figure and their share."""
    found: list[tuple[float, T]] = []
    while len(found) < _ATTEMPTS and (not found or found[-1][0] > plan.max_stolen):
        before = processor_time()
        measured = measure_once()
        found.append((stolen_share(before, processor_time()), measured))
    stolen, figure = min(found, key=lambda pair: pair[0])
    return figure, stolen


class _ServerLoads:
    """All loads of a plan on one running server, in one turn."""

    def __init__(
        self,
        server: MeasuredServer,
        process: RunningServer,
        texts: Sequence[str],
        groups: Sequence[str],
        plan: Plan,
        number: int,
    ) -> None:
        self._server, self._process, self._texts = server, process, texts
        self._plan, self._number = plan, number
        # A slow server answers few of the texts; a new order in each turn gives it other texts.
        pairs = list(zip(texts, groups, strict=True))
        random.Random(number).shuffle(pairs)
        shuffled = [text for text, _ in pairs]
        if plan.texts_per_request == 1:
            self._requests = server.single_requests(shuffled, [group for _, group in pairs])
        else:
            self._requests = server.requests(shuffled, each=plan.texts_per_request)
        self._turns: list[Turn] = []

    async def measure(self) -> list[Turn]:
        """Run the closed loops, those with pauses, the open loops, then singles beside bulk."""
        await self._closed_loop(max(self._plan.clients), min(_WARM_UP_S, self._plan.seconds))
        capacity = await self._closed_loops()
        for pause in self._plan.pauses:
            run = partial(self._closed_loop, 1, self._plan.seconds, pause / 1000)
            await self._record(self._plan.load(LoadKind.PAUSE, pause), run)
        if capacity:
            await self._open_loops(capacity)
        if self._plan.bulk and self._server.max_texts >= _BULK_TEXTS:
            load = self._plan.load(LoadKind.BESIDE_BULK)
            await self._record(load, self._beside_bulk, parts=False)
        return self._turns

    async def _closed_loops(self) -> float:
        """Return the requests per second of the most clients."""
        capacity = 0.0
        for clients in sorted(self._plan.clients):
            run = partial(self._closed_loop, clients, self._plan.seconds)
            turn = await self._record(self._plan.closed(clients), run)
            capacity = turn.requests_per_s
        return capacity

    async def _open_loops(self, capacity: float) -> None:
        for share in self._plan.shares:
            for kind, times in _arrivals(capacity * share, self._plan, self._number):
                run = partial(open_loop, self._process.url, self._requests, times)
                await self._record(self._plan.load(kind, share), run)

    async def _closed_loop(self, clients: int, seconds: float, pause_s: float = 0.0) -> LoadResult:
        return await closed_loop(
            self._process.url, self._requests, clients=clients, seconds=seconds, pause_s=pause_s
        )

    async def _record(
        self, load: Load, run: Callable[[], Awaitable[LoadResult]], *, parts: bool = True
    ) -> Turn:
        """Run a load, again while other guests take too much, and keep the quietest run."""
        found = [await self._run_once(load, run, parts=parts)]
        while len(found) < _ATTEMPTS and found[-1].stolen > self._plan.max_stolen:
            found.append(await self._run_once(load, run, parts=parts))
        turn = min(found, key=lambda turn: turn.stolen)
        self._turns.append(turn)
        return turn

    async def _run_once(
        self, load: Load, run: Callable[[], Awaitable[LoadResult]], *, parts: bool
    ) -> Turn:
        process, url = self._process, self._process.url
        cpu_s, ticks = process.cpu_s(), processor_time()
        before = scrape(url) if self._server.parts and parts else None
        measured = await run()
        usage = ResourceUsage(
            cpu_s=process.cpu_s() - cpu_s,
            rss_mb=process.rss_mb(),
            pss_mb=process.pss_mb(),
            parts_ms={} if before is None else parts_ms(before, scrape(url)),
            stolen=stolen_share(ticks, processor_time()),
        )
        server = self._server
        return make_turn(server.name, server.engine, load, self._number, measured, usage)

    async def _beside_bulk(self) -> LoadResult:
        """Measure one client with single texts while another client sends bulk requests.

        The failures of both clients count.
        """
        url, seconds = self._process.url, self._plan.seconds
        bulk_texts = [self._texts[i % len(self._texts)] for i in range(_BULK_TEXTS)]
        bulk_requests = self._server.requests(bulk_texts, each=_BULK_TEXTS)
        bulk = asyncio.create_task(
            closed_loop(url, bulk_requests, clients=1, seconds=seconds + 2 * _BULK_LEAD_S)
        )
        await asyncio.sleep(_BULK_LEAD_S)
        single = await self._closed_loop(1, seconds)
        for status, count in (await bulk).statuses.items():
            if status != 200:
                single.statuses[status] += count
        return single


def _arrivals(rate: float, plan: Plan, number: int) -> list[tuple[LoadKind, NDArray[np.float64]]]:
    """Return the kinds of arrivals at `rate` per second, and the times of each."""
    kinds = [(LoadKind.POISSON, poisson(rate, plan.seconds, seed=number))]
    if plan.arrivals is not None:
        kinds.append((LoadKind.RECORDED, rescaled(plan.arrivals, rate, plan.seconds)))
    return kinds
