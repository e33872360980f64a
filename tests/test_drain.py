"""`CLOZE_DRAIN_S`: a balancer that notices late loses no request."""

import asyncio
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.serving import Server, running_server

DRAIN_S = 2.0
NOTICES_AFTER_S = 1.5
BODY = {"inputs": "walk"}


class Balancer:
    """Sends requests to a server until its clients are told that it ends.

    Attributes:
        answers: (`time.monotonic` time of the end, status, whether the connection ends).
        lost: the errors of requests without an answer.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.answers: list[tuple[float, int, bool]] = []
        self.lost: list[Exception] = []
        self.stopped = asyncio.Event()

    async def client(self, *, keeps_alive: bool) -> None:
        """Send one request after the other, on one connection or on one connection each."""
        limits = httpx.Limits(max_keepalive_connections=1 if keeps_alive else 0)
        async with httpx.AsyncClient(limits=limits, timeout=30) as client:
            while not self.stopped.is_set():
                try:
                    answer = await client.post(f"{self._url}/embed", json=BODY)
                except httpx.TransportError as error:
                    self.lost.append(error)
                else:
                    ends = answer.headers.get("connection") == "close"
                    self.answers.append((time.monotonic(), answer.status_code, ends))


async def drained(server: Server) -> tuple[Balancer, float]:
    """Send requests, SIGTERM meanwhile, and stop late; return the time of the signal too."""
    balancer = Balancer(server.url)
    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(balancer.client(keeps_alive=number % 2 == 0))
        while len(balancer.answers) < 40:
            await asyncio.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        async with httpx.AsyncClient() as prober:
            while (await prober.get(f"{server.url}/readyz")).status_code == 200:
                assert time.monotonic() < asked + 1
            assert (await prober.get(f"{server.url}/healthz")).status_code == 200
        await asyncio.sleep(asked + NOTICES_AFTER_S - time.monotonic())
        balancer.stopped.set()
    return balancer, asked


@pytest.mark.parametrize("arguments", [(), ("--frontends", "2")], ids=["one", "front-ends"])
def test_a_balancer_that_notices_late_loses_nothing(
    tiny_store: Path, arguments: tuple[str, ...]
) -> None:
    environment = {"CLOZE_DRAIN_S": f"{DRAIN_S}", "CLOZE_WORKERS": "1"}
    with running_server(tiny_store, "--model", "bert", *arguments, **environment) as server:
        balancer, asked = asyncio.run(drained(server))
        assert server.process.wait(20) == 0
        assert time.monotonic() - asked >= DRAIN_S
    assert balancer.lost == []
    assert {status for _, status, _ in balancer.answers} == {200}
    late = [ends for end, _, ends in balancer.answers if end > asked + 1]
    assert len(late) > 8
    assert all(late)
