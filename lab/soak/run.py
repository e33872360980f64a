"""A soak: mixed traffic with faults on a schedule, and checks of what they left."""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cloze.bench.http_client import Request
from cloze.bench.load import closed_loop, open_loop, poisson
from cloze.bench.processes import RunningServer, running
from cloze.bench.texts import words_of
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.service.machine import raise_file_limit
from cloze.service.server.startup import run_loop
from lab.soak.answers import Answers
from lab.soak.processes import FaultKind, inject, sample, schedule, watching
from lab.soak.traffic import leave, make_requests
from lab.soak.verdict import Check, Observed, as_json, as_markdown, checks

_MODEL = "cloze-bert"

_CAPACITY_CLIENTS, _CAPACITY_S = 16, 6.0

_SHARE = 0.6
"""Load, as a share of the capacity."""

_CONNECTIONS = 4096
"""Most connections. With fewer, requests would wait in the generator instead of at the server."""

_LEAVERS = 0.05
"""Clients that leave, as a share of the other requests."""

_REST_S = 1.0
"""Time after the load in which connections close."""


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """What a soak does.

    Attributes:
        frontends: number of front ends; 0: one process.
        rate: requests per second; 0: 60 % of what a closed loop measures.
        requests: number of distinct requests, which the load repeats.
    """

    seconds: float
    frontends: int = 2
    rate: float = 0.0
    faults: tuple[FaultKind, ...] = ()
    fault_every_s: float = 45.0
    sample_every_s: float = 5.0
    requests: int = 400

    @property
    def warm_up_s(self) -> float:
        """After which memory counts."""
        return min(60.0, self.seconds / 5)


def soak(plan: SoakPlan, folder: Path) -> tuple[Observed, list[Check]]:
    """Run a soak, write its results into a folder, and return them.

    Raises:
        BenchError: the server does not start, or ends.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    raise_file_limit(3 * _CONNECTIONS)  # of this process, and of those that it starts
    command = [sys.executable, "-m", "cloze", "serve", "--port", "{port}"]
    if plan.frontends:
        command += ["--frontends", str(plan.frontends)]
    with running(command, "/readyz", log_file=log) as server:
        observed = run_loop(_load(server, plan))
    observed = replace(observed, log=log.read_text(errors="replace"))
    results = checks(observed)
    (folder / "soak.json").write_text(as_json(observed, results))
    (folder / "soak.md").write_text(as_markdown(observed, results))
    return observed, results


async def _load(server: RunningServer, plan: SoakPlan) -> Observed:
    """Send the traffic and the faults, and return what was observed, without the log."""
    bundle = Store(DEFAULT_ROOT).open(_MODEL)
    requests, statuses = make_requests(words_of(bundle), "[MASK]", plan.requests)
    rate = plan.rate or _SHARE * await _capacity(server.url, requests)
    await asyncio.sleep(_REST_S)
    before = sample(server, 0.0)
    arrivals = poisson(rate, plan.seconds)
    leavers = poisson(_LEAVERS * rate, plan.seconds, seed=1)
    third = plan.seconds / 3
    faults = schedule(plan.faults, third, 2 * third, plan.fault_every_s)
    answers = Answers(requests, statuses)
    with watching(server, plan.sample_every_s) as samples:
        async with asyncio.TaskGroup() as tasks:
            load = open_loop(
                server.url, requests, arrivals, connections=_CONNECTIONS, on_answer=answers.add
            )
            tasks.create_task(load)
            tasks.create_task(leave(server.url, requests, leavers))
            injected = tasks.create_task(inject(server, faults))
    await asyncio.sleep(_REST_S)
    after = sample(server, plan.seconds)
    return Observed(
        plan.seconds,
        plan.warm_up_s,
        sent=len(arrivals),
        answers=answers,
        faults=injected.result(),
        samples=samples,
        rest=(before, after),
    )


async def _capacity(url: str, requests: Sequence[Request]) -> float:
    """Return the requests per second of a closed loop."""
    await closed_loop(url, requests, clients=_CAPACITY_CLIENTS, seconds=_CAPACITY_S / 3)
    load = await closed_loop(url, requests, clients=_CAPACITY_CLIENTS, seconds=_CAPACITY_S)
    return load.statuses.total() / load.seconds
