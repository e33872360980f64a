"""A closed loop whose clients try again after a refusal: at once, or when `Retry-After` says so.

Most load generators (hey, wrk, ab, locust) and most pools of threads try again at once.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hdrh.histogram import HdrHistogram

from cloze.bench.http_client import Connection, Request
from cloze.bench.load import bounded_wait, histogram

REFUSED = 429


@dataclass(slots=True)
class Retries:
    """What the clients of one loop observed.

    Attributes:
        statuses: of all responses, the lead-in included; 0 stands for a connection that closed.
        latencies: of the answers with status 200 after the lead-in, each from its last try.
        told: refusals by their `Retry-After` in seconds; 0 stands for none.
        admitted: requests by the try that was not refused: 1, 2, ...
        refused_twice: requests whose second try was refused.
    """

    seconds: float
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: HdrHistogram = field(default_factory=histogram)
    told: Counter[float] = field(default_factory=Counter)
    admitted: Counter[int] = field(default_factory=Counter)
    refused_twice: int = 0

    @property
    def answers_per_s(self) -> float:
        """Return the answers with status 200 per second after the lead-in."""
        return float(self.latencies.get_total_count()) / self.seconds

    @property
    def soon_admitted(self) -> float:
        """Return the share of requests that were admitted at the second try at the latest."""
        soon = self.admitted[1] + self.admitted[2]
        return soon / max(1, soon + self.refused_twice)


async def retrying_loop(
    url: str,
    requests: Sequence[Request],
    *,
    clients: int,
    seconds: float,
    waits: bool,
    lead_in_s: float = 0.0,
) -> Retries:
    """Send requests over `clients` connections, each one when the last one is answered.

    Args:
        requests: all clients share them in order, and start again after the last.
        waits: a refused client waits for its `Retry-After`, or else tries again at once.
        lead_in_s: time of the same load before the `seconds` in which answers count.

    Raises:
        BenchError: the server has closed, or does not answer.
    """
    result = Retries(seconds)
    begin = time.perf_counter() + lead_in_s
    end = begin + seconds
    number = 0

    async def client() -> None:
        nonlocal number
        connection = await Connection.connect(url)
        tries, request = 0, requests[0]
        while (sent := time.perf_counter()) < end:
            if not tries:
                request = requests[number % len(requests)]
                number += 1
            tries += 1
            try:
                response = await connection.send(request.data)
            except ConnectionError:
                result.statuses[0] += 1
                await connection.close()
                connection = await Connection.connect(url)
                continue
            now = time.perf_counter()
            result.statuses[response.status] += 1
            if response.status == REFUSED:
                result.told[response.retry_after_s] += 1
                result.refused_twice += tries == 2
                if waits:
                    await asyncio.sleep(max(0.0, min(response.retry_after_s, end - now)))
                continue
            result.admitted[tries] += 1
            tries = 0
            if response.status == 200 and begin <= now < end:
                result.latencies.record_value(max(1, round((now - sent) * 1e6)))
        await connection.close()

    async with bounded_wait(lead_in_s + seconds), asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
    return result
