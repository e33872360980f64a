"""Measures every subject in turn, under every load, on the same texts, and repeats the turns."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cloze.bench.errors import BenchError
from cloze.bench.load import LoadResult, closed_loop, open_loop, poisson
from cloze.bench.machine import stolen_share
from cloze.bench.processes import MeasuredServer, RunningServer
from cloze.bench.result import Load, LoadKind, Result, ServerStart, Turn
from cloze.bench.subjects import EngineAlone
from cloze.service.server.startup import run_loop
from cloze.tables import report

_BULK_TEXTS = 2048
_WARM_UP_S = 1.0
_BULK_LEAD_S = 0.5
"""A bulk request runs this long before the single requests start, and after they end."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The loads of a measurement.

    Attributes:
        clients: of the closed loops, one load each; at least one.
        pauses: milliseconds between an answer and the next request of one client, one load each.
        shares: of the open loops: arrivals per second over the rate of the closed loop with the
            most clients.
        texts_per_request: of all loads.
        bulk: whether to measure single requests beside one client whose bulk requests of 2,048
            texts never stop.
        label: ends the names of all loads, where a result has several plans.
    """

    clients: tuple[int, ...] = (1, 32)
    pauses: tuple[float, ...] = ()
    shares: tuple[float, ...] = (0.7,)
    texts_per_request: int = 1
    bulk: bool = True
    seconds: float = 10.0
    turns: int = 3
    label: str = ""

    def load(self, kind: LoadKind, number: float | None = None) -> Load:
        """Return a load of this plan."""
        return Load(kind, number, self.label)

    def closed(self, clients: int) -> Load:
        """Return a closed loop."""
        return self.load(LoadKind.CLOSED, clients)


def measure(
    engines: Mapping[str, Callable[[], EngineAlone]],
    servers: Sequence[MeasuredServer],
    texts: Sequence[str],
    plan: Plan,
    result: Result,
) -> None:
    """Run the plan, add the figures to the result, and print them as progress.

    If a server does not start or exits, the rest of its turn is left out and noted.

    Args:
        engines: by name; each opens one engine.
        servers: measured over HTTP.
    """
    for number in range(plan.turns):
        for name, open_engine in engines.items():
            _add(_measure_engine(name, open_engine(), plan, number), result)
        for server in servers:
            try:
                with server.start() as process:
                    start = ServerStart(server.name, process.ready_s, process.rss_mb())
                    result.starts.append(start)
                    turns = _ServerLoads(server, process, texts, plan, number).measure()
            except BenchError as error:
                result.note(f"turn {number}: {server.name} is left out: {error}")
            else:
                _add(turns, result)


def _add(turns: Sequence[Turn], result: Result) -> None:
    result.turns.extend(turns)
    for turn in turns:
        latency = "".join(
            f", {name} {turn.latency_ms[name]:.2f} ms"
            for name in ("p50", "p99")
            if name in turn.latency_ms
        )
        failed = f", failed {turn.failed}" if turn.failed else ""
        title = f"turn {turn.turn}: {turn.load.name}, {turn.subject}"
        report(f"{title}: {turn.texts_per_s:.1f} texts/s{latency}{failed}")


def _measure_engine(name: str, engine: EngineAlone, plan: Plan, number: int) -> list[Turn]:
    turns = []
    stolen_share()
    if plan.texts_per_request == 1:  # otherwise no load of the plan sends single texts
        latencies = engine.single_latencies(plan.seconds)
        count = latencies.get_total_count()
        single = LoadResult(plan.seconds, requests=count, texts=count, latencies=latencies)
        turn = Turn.of_load(name, name, plan.closed(1), number, single)
        turns.append(replace(turn, stolen=stolen_share()))
    # One client with single texts gives no batch.
    if plan.texts_per_request > 1 or max(plan.clients) > 1:
        rate = engine.texts_per_s(plan.seconds)
        load = plan.closed(max(plan.clients))
        turns.append(Turn(name, load, number, rate, stolen=stolen_share(), engine=name))
    return turns


class _ServerLoads:
    """All loads of a plan on one running server, in one turn."""

    def __init__(
        self,
        server: MeasuredServer,
        process: RunningServer,
        texts: Sequence[str],
        plan: Plan,
        number: int,
    ) -> None:
        self._server, self._process, self._texts = server, process, texts
        self._plan, self._number = plan, number
        # A slow server answers few of the texts; a new order in each turn gives it other texts.
        shuffled = random.Random(number).sample(texts, len(texts))
        self._requests = server.requests(shuffled, each=plan.texts_per_request)
        self._turns: list[Turn] = []

    def measure(self) -> list[Turn]:
        """Run the closed loops, those with pauses, the open loops, then singles beside bulk."""
        plan = self._plan
        run_loop(self._closed_loop(max(plan.clients), min(_WARM_UP_S, plan.seconds)))
        capacity = 0.0
        for clients in sorted(plan.clients):
            run = partial(self._closed_loop, clients, plan.seconds)
            capacity = self._record(plan.closed(clients), run).requests_per_s
        for pause in plan.pauses:
            run = partial(self._closed_loop, 1, plan.seconds, pause / 1000)
            self._record(plan.load(LoadKind.PAUSE, pause), run)
        for share in plan.shares if capacity else ():
            times = poisson(capacity * share, plan.seconds, seed=self._number)
            arrive = partial(open_loop, self._process.url, self._requests, times)
            self._record(plan.load(LoadKind.POISSON, share), arrive)
        if plan.bulk:
            self._record(plan.load(LoadKind.BESIDE_BULK), self._beside_bulk)
        return self._turns

    async def _closed_loop(self, clients: int, seconds: float, pause_s: float = 0.0) -> LoadResult:
        return await closed_loop(
            self._process.url, self._requests, clients=clients, seconds=seconds, pause_s=pause_s
        )

    def _record(self, load: Load, run: Callable[[], Coroutine[None, None, LoadResult]]) -> Turn:
        """Run a load, and keep its figures and what the server used."""
        server, process = self._server, self._process
        cpu_s = process.cpu_s()
        stolen_share()
        measured = run_loop(run())
        turn = Turn.of_load(server.name, server.engine, load, self._number, measured)
        turn = replace(
            turn,
            cpu_s=process.cpu_s() - cpu_s,
            rss_mb=process.rss_mb(),
            pss_mb=process.pss_mb(),
            stolen=stolen_share(),
        )
        self._turns.append(turn)
        return turn

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
