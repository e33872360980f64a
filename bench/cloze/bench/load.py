"""Sends requests in a closed loop (each client waits for its answer) or an open loop (none waits).

In the open loop, the latency of a request counts from the time at which the request was due, not
from the time at which the client sent the request. A server that stalls is charged for all requests
that arrive meanwhile (coordinated omission; Tene 2013, "How NOT to measure latency").
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from hdrh.histogram import HdrHistogram
from numpy.typing import NDArray

from cloze.bench.errors import BenchError
from cloze.bench.http_client import Connection, Request, Response

_MAX_LATENCY_US = 3_600_000_000
_SIGNIFICANT_DIGITS = 3

_DRAIN_TIMEOUT_S = 120.0
"""For the last answers, after the end of a load."""

MAX_CONNECTIONS = 512
"""Default of the open loop. Further arrivals wait for a connection, which counts as latency."""

_IDLE_S = 10.0
"""Time after which the open loop closes a connection that it does not need any more."""


def histogram() -> HdrHistogram:
    """Return a histogram of latencies from 1 us to an hour, exact to three digits."""
    return HdrHistogram(1, _MAX_LATENCY_US, _SIGNIFICANT_DIGITS)


@dataclass(slots=True)
class LoadResult:
    """What the clients of one load observed.

    Attributes:
        texts: of the requests answered with status 200.
        statuses: number of answers by status; 0 stands for a connection that closed.
        client_cpu_s: processor time of this process during the load, in seconds.
    """

    seconds: float = 0.0
    requests: int = 0
    texts: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: HdrHistogram = field(default_factory=histogram)
    client_cpu_s: float = 0.0

    def record(self, response: Response | None, request: Request, seconds: float) -> None:
        """Count one response; None stands for a connection that closed."""
        status = response.status if response else 0
        self.statuses[status] += 1
        if status == 200:
            self.requests += 1
            self.texts += request.texts
            self.latencies.record_value(max(1, round(seconds * 1e6)))


async def closed_loop(
    url: str, requests: Sequence[Request], *, clients: int, seconds: float, pause_s: float = 0.0
) -> LoadResult:
    """Send requests over `clients` connections, each `pause_s` after its last answer.

    Answers within the time count. Requests that are unanswered at the end do not count; the
    function waits for their answers.

    Args:
        url: of a server that is warm.
        requests: all clients share them in order, and start again after the last.

    Raises:
        BenchError: the server has closed, or does not answer.
    """
    result = LoadResult(seconds=seconds)
    cpu_s = time.process_time()
    end = time.perf_counter() + seconds
    number = 0

    async def client() -> None:
        nonlocal number
        connection = await Connection.connect(url)
        now = time.perf_counter()
        while now < end:
            request = requests[number % len(requests)]
            number += 1
            sent = now
            try:
                response: Response | None = await connection.send(request.data)
            except ConnectionError:
                response = None
            now = time.perf_counter()
            if now < end:
                result.record(response, request, now - sent)
            if response is None:
                await connection.close()
                connection = await Connection.connect(url)
            if pause_s:
                await asyncio.sleep(pause_s)
                now = time.perf_counter()
        await connection.close()

    async with bounded_wait(seconds), asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
    result.client_cpu_s = time.process_time() - cpu_s
    return result


@asynccontextmanager
async def bounded_wait(seconds: float) -> AsyncIterator[None]:
    """Raise a `BenchError` if a load of `seconds` does not end in time or the server closes."""
    try:
        async with asyncio.timeout(seconds + _DRAIN_TIMEOUT_S):
            yield
    except TimeoutError:
        raise BenchError(
            f"requests were not answered {_DRAIN_TIMEOUT_S:g} s after the load's end"
        ) from None
    except ExceptionGroup as group:
        if (refused := group.subgroup(OSError)) is None:
            raise
        raise BenchError(f"the server is gone: {refused.exceptions[0]}") from None


class Answer(NamedTuple):
    """What became of one request of an open loop.

    Attributes:
        due_s: seconds from the start of the load until the request was due.
        seconds: from then until the answer.
        response: the answer; None stands for a connection that closed.
    """

    number: int
    due_s: float
    seconds: float
    response: Response | None


class _ConnectionPool:
    """Connections of the open loop, opened when needed."""

    def __init__(self, url: str, most: int) -> None:
        self._url = url
        self._idle: deque[tuple[float, Connection]] = deque()  # by the end of the last request
        self._slots = asyncio.Semaphore(most)

    async def send(self, request: bytes) -> Response | None:
        """Return the response, or None if the connection closed."""
        async with self._slots:
            connection: Connection | None = None
            try:
                connection = await self._take()
                response = await connection.send(request)
            except OSError:
                if connection is not None:
                    await connection.close()
                return None
            now = time.perf_counter()
            self._idle.append((now, connection))
            while self._idle[0][0] < now - _IDLE_S:
                self._idle.popleft()[1].close_soon()
            return response

    async def _take(self) -> Connection:
        while self._idle:
            _, connection = self._idle.pop()
            if connection.open:
                return connection
            await connection.close()  # a server may close idle connections
        return await Connection.connect(self._url)

    async def close(self) -> None:
        """Close the idle connections."""
        for _, connection in self._idle:
            await connection.close()


async def open_loop(
    url: str,
    requests: Sequence[Request],
    arrivals: NDArray[np.float64],
    *,
    connections: int = MAX_CONNECTIONS,
    on_answer: Callable[[Answer], None] | None = None,
) -> LoadResult:
    """Send request `i` after ``arrivals[i]`` seconds, whether earlier ones are answered or not.

    Args:
        requests: sent in order; the first follows the last.
        arrivals: float64 [n], ascending.

    Raises:
        BenchError: the server does not answer.
    """
    result = LoadResult()
    pool = _ConnectionPool(url, connections)
    cpu_s = time.process_time()
    start = time.perf_counter() + 0.1

    async def send(number: int, due: float) -> None:
        request = requests[number]
        response = await pool.send(request.data)
        seconds = time.perf_counter() - due
        result.record(response, request, seconds)
        if on_answer is not None:
            on_answer(Answer(number, due - start, seconds, response))

    async with bounded_wait(float(arrivals[-1])), asyncio.TaskGroup() as tasks:
        for number, arrival in enumerate(arrivals):
            due = start + float(arrival)
            # The loop's timers are exact to a millisecond, so one sleep may be too short.
            while (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.create_task(send(number % len(requests), due))
    result.seconds = time.perf_counter() - start
    result.client_cpu_s = time.process_time() - cpu_s
    await pool.close()
    return result


def poisson(rate: float, seconds: float, seed: int = 0) -> NDArray[np.float64]:
    """Return arrival times of a Poisson process, at least one.

    Returns:
        float64 [n] seconds, ascending.
    """
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate, size=max(1, round(rate * seconds * 1.5) + 20))
    times = np.cumsum(gaps)
    return times[: max(1, int(np.searchsorted(times, seconds)))]
