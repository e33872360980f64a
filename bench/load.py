"""When requests are sent: closed loop (each client waits for its answer) and open loop (arrivals wait for nobody).

In the open loop a request's latency counts from the moment it was due, not from when it was sent: a server that stalls is
charged for all who would have come meanwhile (coordinated omission; Tene 2013, "How NOT to measure latency").
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
from hdrh.histogram import HdrHistogram
from numpy.typing import NDArray

from bench.errors import BenchError
from bench.http_client import Connection, Reply

_LARGEST_US = 3_600_000_000
_DIGITS = 3

_PATIENCE_S = 120.0

MAX_CONNECTIONS = 512
"""Of the open loop; arrivals beyond them wait, on the server's account."""


def histogram() -> HdrHistogram:
    """Of latencies in microseconds, exact to three digits from 1 us to an hour."""
    return HdrHistogram(1, _LARGEST_US, _DIGITS)


@dataclass(frozen=True, slots=True)
class Request:
    """Prebuilt bytes, and how much they ask for."""

    data: bytes
    texts: int = 1


@dataclass(slots=True)
class Load:
    """What one turn of load found.

    Attributes:
        seconds: from the first request counted to the last answer.
        requests, texts: answered with 200.
        statuses: how many answers had each status; 0 stands for a connection that ended.
        latencies: of those answered with 200, in microseconds.
    """

    seconds: float = 0.0
    requests: int = 0
    texts: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: HdrHistogram = field(default_factory=histogram)

    def count(self, reply: Reply | None, texts: int, seconds: float) -> None:
        """One answer, or none."""
        status = reply.status if reply else 0
        self.statuses[status] += 1
        if status == 200:
            self.requests += 1
            self.texts += texts
            self.latencies.record_value(max(1, round(seconds * 1e6)))


async def closed_loop(
    url: str, requests: Sequence[Request], *, clients: int, seconds: float
) -> Load:
    """``clients`` connections, each sending its next request when its last is answered.

    What is answered within the time counts; what is under way at its end does not, and is waited for.

    Args:
        url: of the server, which is warm.
        requests: taken in turn by all clients, from the first again after the last.
        clients: how many.
        seconds: how long.

    Raises:
        BenchError: the server is gone, or does not answer.
    """
    load = Load(seconds=seconds)
    end = time.perf_counter() + seconds
    number = 0

    async def client() -> None:
        nonlocal number
        connection = await Connection.to(url)
        now = time.perf_counter()
        while now < end:
            request = requests[number % len(requests)]
            number += 1
            sent = now
            try:
                reply: Reply | None = await connection.send(request.data)
            except ConnectionError:
                reply = None
            now = time.perf_counter()
            if now < end:
                load.count(reply, request.texts, now - sent)
            if reply is None:
                await connection.close()
                connection = await Connection.to(url)
        await connection.close()

    async with _answered(seconds), asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
    return load


@asynccontextmanager
async def _answered(seconds: float) -> AsyncIterator[None]:
    """Nobody waits forever: what a load of so many seconds has not ended by itself some time later ends with an error."""
    try:
        async with asyncio.timeout(seconds + _PATIENCE_S):
            yield
    except TimeoutError:
        raise BenchError(
            f"requests were not answered {_PATIENCE_S:g} s after the load's end"
        ) from None
    except ExceptionGroup as group:
        if (gone := group.subgroup(OSError)) is None:
            raise
        raise BenchError(f"the server is gone: {gone.exceptions[0]}") from None


async def open_loop(url: str, requests: Sequence[Request], arrivals: NDArray[np.float64]) -> Load:
    """Request ``i`` is due ``arrivals[i]`` seconds after the start, whether earlier ones are answered or not.

    Args:
        url: of the server.
        requests: taken in turn.
        arrivals: float64 [n], ascending.

    Raises:
        BenchError: the server does not answer.
    """
    load = Load()
    free: list[Connection] = []
    slots = asyncio.Semaphore(MAX_CONNECTIONS)
    start = time.perf_counter() + 0.1

    async def one(request: Request, due: float) -> None:
        async with slots:
            reply = connection = None
            try:
                while free and not free[-1].open:  # the server may close what is idle
                    await free.pop().close()
                connection = free.pop() if free else await Connection.to(url)
                reply = await connection.send(request.data)
                free.append(connection)
            except OSError:
                if connection is not None:
                    await connection.close()
        load.count(reply, request.texts, time.perf_counter() - due)

    async with _answered(float(arrivals[-1])), asyncio.TaskGroup() as tasks:
        for number, arrival in enumerate(arrivals):
            due = start + float(arrival)
            while (
                wait := due - time.perf_counter()
            ) > 0:  # the loop's timers are exact to a millisecond
                await asyncio.sleep(wait)
            tasks.create_task(one(requests[number % len(requests)], due))
    load.seconds = time.perf_counter() - start
    for connection in free:
        await connection.close()
    return load


def poisson(rate: float, seconds: float, seed: int = 0) -> NDArray[np.float64]:
    """Arrival times of a Poisson process: ``rate`` a second for ``seconds``, at least one."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate, size=max(1, round(rate * seconds * 1.5) + 20))
    times = np.cumsum(gaps)
    return times[: max(1, int(np.searchsorted(times, seconds)))]


def rescaled(arrivals: NDArray[np.float64], rate: float, seconds: float) -> NDArray[np.float64]:
    """Recorded arrival times, sped up or slowed down to a mean of ``rate`` a second; their burstiness stays.

    Args:
        arrivals: float64 [n] seconds, ascending, at least two.
        rate: a second, over the whole recording.
        seconds: how much of it to keep.
    """
    times: NDArray[np.float64] = (arrivals - arrivals[0]) * (
        (len(arrivals) - 1) / (arrivals[-1] - arrivals[0]) / rate
    )
    return times[times <= seconds]
