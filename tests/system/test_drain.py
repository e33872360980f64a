"""`CLOZE_DRAIN_S`: a balancer that notices late loses no request."""

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path

import httpx

from tests.support.serving import Server, children, running_server

DRAIN_S = 120.0
"""Longer than the test. A signal ends the wait when enough requests were answered meanwhile."""

CLIENTS = 8
BODY = {"inputs": "walk"}


class Balancer:
    """Sends requests to a server until its clients are told that it ends.

    Attributes:
        answers: (client, `time.monotonic` time of the request, status, whether the connection ends).
        lost: the errors of requests without an answer.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.answers: list[tuple[int, float, int, bool]] = []
        self.lost: list[Exception] = []
        self.stopped = asyncio.Event()

    async def client(self, number: int) -> None:
        """Send one request after the other, on one connection or on one connection each."""
        limits = httpx.Limits(max_keepalive_connections=number % 2)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            while not self.stopped.is_set():
                asked = time.monotonic()
                try:
                    answer = await client.post(f"{self._url}/embed", json=BODY)
                except httpx.TransportError as error:
                    self.lost.append(error)
                else:
                    ends = answer.headers.get("connection") == "close"
                    self.answers.append((number, asked, answer.status_code, ends))

    async def until_answered(self, since: float = 0.0) -> None:
        """Wait until each client has two answers to requests that were sent after a time."""
        counts: Counter[int] = Counter()
        while len(counts) < CLIENTS or min(counts.values()) < 2:
            await asyncio.sleep(0.01)
            counts = Counter(number for number, asked, *_ in self.answers if asked > since)


async def drained(server: Server, processes: int) -> tuple[Balancer, float]:
    """Send requests before SIGTERM and after; return the time at which all processes had it."""
    balancer = Balancer(server.url)
    async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(balancer.client(number))
        await balancer.until_answered()
        while not any("front ends are ready" in line for line in server.log):
            await asyncio.sleep(0.01)  # one that still starts would end without a drain
        server.process.send_signal(signal.SIGTERM)
        while sum("readiness fails" in line for line in server.log) < processes:
            await asyncio.sleep(0.01)
        told = time.monotonic()
        async with httpx.AsyncClient(timeout=60) as prober:
            assert (await prober.get(f"{server.url}/readyz")).status_code == 503
            assert (await prober.get(f"{server.url}/healthz")).status_code == 200
        await balancer.until_answered(told)
        balancer.stopped.set()
    return balancer, told


def test_a_balancer_that_notices_late_loses_nothing(tiny_store: Path) -> None:
    environment = {"CLOZE_DRAIN_S": f"{DRAIN_S}", "CLOZE_WORKERS": "1"}
    arguments = ("--model", "bert", "--frontends", "2")
    with running_server(tiny_store, *arguments, **environment) as server:
        balancer, told = asyncio.run(drained(server, 2))
        assert server.process.poll() is None, "the server serves until the wait ends"
        for pid in children(server.process.pid, "frontend"):
            os.kill(pid, signal.SIGINT)
        assert server.process.wait(60) == 0
    assert balancer.lost == []
    assert {status for _, _, status, _ in balancer.answers} == {200}
    assert all(ends for _, asked, _, ends in balancer.answers if asked > told)


def test_the_wait_ends_by_itself(tiny_store: Path) -> None:
    with running_server(tiny_store, "--model", "bert", CLOZE_DRAIN_S="0.5") as server:
        server.process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        assert server.process.wait(60) == 0
        assert time.monotonic() - asked >= 0.5
