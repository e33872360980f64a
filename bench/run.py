"""One run: every subject in turn, under every load, on the same texts; then the same again, as often as asked."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import uvloop
from numpy.typing import NDArray

from bench.errors import BenchError
from bench.load import Load, Request, closed_loop, open_loop, poisson, rescaled
from bench.parts import parts_ms, scrape
from bench.processes import Running
from bench.result import Start, Turn, turn_of
from bench.subjects import EngineAlone, Served

_BULK_TEXTS = 2048
_WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to put on every server.

    Attributes:
        clients: of the closed loops, one load each; at least one.
        shares: of the open loops: arrivals a second over what the closed loop with the most clients answered.
        arrivals: recorded arrival times in seconds, float64 [n], to be sent at the same shares; None: none.
        texts_per_request: of all loads.
        bulk: whether to measure single requests beside one client that always has a bulk request of 2,048 texts running.
        seconds: of every load.
        turns: how often all of it.
        label: of the closed loops, where results have several plans.
    """

    clients: tuple[int, ...] = (1, 32)
    shares: tuple[float, ...] = (0.7,)
    arrivals: NDArray[np.float64] | None = None
    texts_per_request: int = 1
    bulk: bool = True
    seconds: float = 10.0
    turns: int = 3
    label: str = ""

    def closed(self, clients: int) -> str:
        """The name of a closed loop."""
        return f"closed {clients} {self.label}".strip()


def measure(
    engines: Mapping[str, Callable[[], EngineAlone]],
    servers: Sequence[Served],
    texts: Sequence[str],
    plan: Plan,
    say: Callable[[str], None],
) -> tuple[list[Turn], list[Start]]:
    """Run the plan. Of a server that does not start or ends, the rest is left out, and said.

    Args:
        engines: by name; each opens one.
        servers: those that are measured over HTTP.
        texts: what is sent to all.
        plan: how.
        say: is told what was found, a line each.
    """
    turns: list[Turn] = []
    starts: list[Start] = []
    for number in range(plan.turns):
        for name, make in engines.items():
            _note(_measure_engine(name, make(), plan, number), turns, say)
        for server in servers:
            try:
                with server.start() as process:
                    starts.append(Start(server.name, process.ready_s, process.rss_mb()))
                    _note(
                        uvloop.run(_measure_server(server, process, texts, plan, number)),
                        turns,
                        say,
                    )
            except BenchError as error:
                say(f"turn {number}: {server.name} is left out: {error}")
    return turns, starts


def _note(found: list[Turn], turns: list[Turn], say: Callable[[str], None]) -> None:
    turns += found
    for turn in found:
        latency = "".join(
            f", {name} {turn.latency_ms[name]:.2f} ms"
            for name in ("p50", "p99")
            if name in turn.latency_ms
        )
        failed = f", failed {turn.failed}" if turn.failed else ""
        say(
            f"turn {turn.turn}: {turn.load}, {turn.subject}: {turn.texts_per_s:.1f} texts/s{latency}{failed}"
        )


def _measure_engine(name: str, engine: EngineAlone, plan: Plan, number: int) -> list[Turn]:
    found = []
    if plan.texts_per_request == 1:  # else no load of the plan has single texts
        single = Load(seconds=plan.seconds, latencies=engine.one_at_a_time(plan.seconds))
        single.requests = single.texts = single.latencies.get_total_count()
        found.append(turn_of(name, plan.closed(1), number, single, cpu_s=0.0, rss_mb=0.0))
    if (
        plan.texts_per_request > 1 or max(plan.clients) > 1
    ):  # else one client's single texts are no batch
        found.append(Turn(name, plan.closed(max(plan.clients)), number, engine.run(plan.seconds)))
    return found


async def _measure_server(
    server: Served, process: Running, texts: Sequence[str], plan: Plan, number: int
) -> list[Turn]:
    shuffled = list(texts)
    random.Random(number).shuffle(shuffled)  # a slow server meets few of them, each turn others
    requests = server.requests(shuffled, each=plan.texts_per_request)
    found: list[Turn] = []

    async def turn(name: str, load: Awaitable[Load], *, parts: bool = True) -> Turn:
        cpu, times = process.cpu_s(), scrape(process.url) if server.parts and parts else None
        result = await load
        cpu_s = process.cpu_s() - cpu
        spent = parts_ms(times, scrape(process.url)) if times is not None else None
        found.append(
            turn_of(
                server.name,
                name,
                number,
                result,
                cpu_s=cpu_s,
                rss_mb=process.rss_mb(),
                parts_ms=spent,
            )
        )
        return found[-1]

    await closed_loop(process.url, requests, clients=max(plan.clients), seconds=_WARM_UP_S)
    capacity = 0.0
    for clients in sorted(plan.clients):
        closed = await turn(
            plan.closed(clients),
            closed_loop(process.url, requests, clients=clients, seconds=plan.seconds),
        )
        capacity = closed.requests_per_s  # in the end, that of the most clients
    for share in plan.shares if capacity else ():
        for kind, times in _arrivals(capacity * share, plan, number):
            await turn(f"{kind} {share:g}", open_loop(process.url, requests, times))
    if plan.bulk and server.lists:
        await turn(
            "single beside bulk",
            _beside_bulk(server, process.url, texts, requests, plan.seconds),
            parts=False,
        )
    return found


def _arrivals(rate: float, plan: Plan, number: int) -> list[tuple[str, NDArray[np.float64]]]:
    kinds = [("poisson", poisson(rate, plan.seconds, seed=number))]
    if plan.arrivals is not None:
        kinds.append(("recorded", rescaled(plan.arrivals, rate, plan.seconds)))
    return kinds


async def _beside_bulk(
    server: Served, url: str, texts: Sequence[str], requests: list[Request], seconds: float
) -> Load:
    """The load of one client with single texts, while another keeps a bulk request running; failures are of both."""
    bulk = server.requests([texts[i % len(texts)] for i in range(_BULK_TEXTS)], each=_BULK_TEXTS)
    beside = asyncio.create_task(closed_loop(url, bulk, clients=1, seconds=seconds + 1.0))
    await asyncio.sleep(0.5)  # until it has begun
    single = await closed_loop(url, requests, clients=1, seconds=seconds)
    failed = {status: count for status, count in (await beside).statuses.items() if status != 200}
    single.statuses.update(failed)
    return single
