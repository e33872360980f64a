"""A soak: mixed traffic with faults on a schedule, and checks of what they left."""

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from cloze.bench.http_client import Request
from cloze.bench.load import MANY_CONNECTIONS, closed_loop, open_loop, poisson
from cloze.bench.machine import describe_machine
from cloze.bench.processes import RunningServer, free_port, running
from cloze.bench.soak.answers import Answers
from cloze.bench.soak.faults import Fault, FaultKind, inject, schedule
from cloze.bench.soak.report import as_json, as_markdown, draw
from cloze.bench.soak.traffic import leave, make_requests
from cloze.bench.soak.verdict import Check, Observed, checks
from cloze.bench.soak.watch import Sample, sample, watching
from cloze.bench.texts import words_of
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT

_MODEL = "cloze-bert"

_CAPACITY_CLIENTS, _CAPACITY_S = 16, 6.0

_LEAVERS = 0.05
"""Clients that leave, as a share of the other requests."""

_REST_S = 1.0
"""Time after the load in which connections close."""


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """What a soak does.

    Attributes:
        frontends: number of front ends; 0: one process.
        share: of the capacity, which the load offers.
        rate: requests per second instead; 0: `share` decides.
        requests: number of distinct requests, which the load repeats.
    """

    seconds: float
    frontends: int = 2
    share: float = 0.6
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
    port = free_port()
    command = [sys.executable, "-m", "cloze", "serve", "--port", str(port)]
    if plan.frontends:
        command += ["--frontends", str(plan.frontends)]
    own = {name: value for name, value in os.environ.items() if not name.startswith("CLOZE_")}
    url = f"http://127.0.0.1:{port}"
    with running(command, url, "/readyz", environment=own, log_file=log) as server:
        measured = uvloop.run(_load(server, plan))
    observed = Observed(
        plan.seconds, plan.warm_up_s, *measured, log=log.read_text(errors="replace")
    )
    results = checks(observed)
    machine = describe_machine(len(os.sched_getaffinity(0)))
    (folder / "soak.json").write_text(as_json(observed, results, machine))
    (folder / "soak.md").write_text(as_markdown(observed, results))
    draw(observed, folder / "soak.png")
    return observed, results


async def _load(
    server: RunningServer, plan: SoakPlan
) -> tuple[int, Answers, list[Fault], list[Sample], tuple[Sample, Sample]]:
    """Send the traffic and the faults.

    Returns:
        The number of requests, their answers, the faults, the samples, and those at rest.
    """
    bundle = Store(DEFAULT_ROOT).open(_MODEL)
    requests, statuses = make_requests(words_of(bundle), "[MASK]", plan.requests)
    rate = plan.rate or plan.share * await _capacity(server.url, requests)
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
                server.url, requests, arrivals, connections=MANY_CONNECTIONS, on_answer=answers.add
            )
            tasks.create_task(load)
            tasks.create_task(leave(server.url, requests, leavers))
            injected = tasks.create_task(inject(server, faults))
    await asyncio.sleep(_REST_S)
    after = sample(server, plan.seconds)
    return len(arrivals), answers, injected.result(), samples, (before, after)


async def _capacity(url: str, requests: Sequence[Request]) -> float:
    """Return the requests per second of a closed loop."""
    await closed_loop(url, requests, clients=_CAPACITY_CLIENTS, seconds=_CAPACITY_S / 3)
    load = await closed_loop(url, requests, clients=_CAPACITY_CLIENTS, seconds=_CAPACITY_S)
    return load.statuses.total() / load.seconds
