"""Starts admitted requests, a few per turn of the event loop, and the clients by turns.

The headers of thousands of requests may arrive in one turn. If the handlers of all of them ran in
the next one, probes and refusals would wait for seconds.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from cloze.service.batching.measures import DrainRate

_PER_TURN = 4
"""Most requests that start per turn; a handler takes about 0.2 ms until it waits."""

_RATE_LASTS_S = 2.0
"""Time after which a measured rate is forgotten: later requests may cost less."""


class Starts:
    """The requests of one process that are admitted and have not started."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Callable[[], None]]] = {}  # by client, the next one first
        self._waiting = 0
        self._started = 0  # in this turn
        self._rate = DrainRate()
        self._measured = 0.0  # `time.monotonic` time of the last turn with a line

    def start(self, client: str, begin: Callable[[], None]) -> bool:
        """Call a function in this turn or in a later one.

        Args:
            client: the client of the request.
            begin: starts the request.

        Returns:
            Whether the request has started.
        """
        if self._waiting or self._started >= _PER_TURN:
            self._lines.setdefault(client, deque()).append(begin)
            self._waiting += 1
            return False
        if not self._started:
            asyncio.get_running_loop().call_soon(self._turn)
        self._started += 1
        begin()
        return True

    def expected_wait_s(self, client: str) -> float:
        """Return the seconds until a request of a client that arrives now starts."""
        rate = self._rate.per_s
        if not self._waiting or not rate or time.monotonic() - self._measured > _RATE_LASTS_S:
            return 0.0
        own = len(self._lines.get(client, ())) + 1
        clients = len(self._lines) + (own == 1)
        return min(self._waiting, own * clients) / rate

    def _turn(self) -> None:
        """Start the requests of the next turn."""
        self._started = 0
        if not self._waiting:
            return
        while self._waiting and self._started < _PER_TURN:
            client, line = next(iter(self._lines.items()))
            begin = line.popleft()
            del self._lines[client]
            if line:
                self._lines[client] = line  # behind the other clients
            self._waiting -= 1
            self._started += 1
            begin()
        self._measured = time.monotonic()
        self._rate.batch_ended(self._measured, self._started, waiting=self._waiting > 0)
        asyncio.get_running_loop().call_soon(self._turn)
