"""Decides which requests are refused before their bodies are parsed, and when the others start.

Without the gate, a refusal costs almost as much as an answer, and under an overload refusals take
the processor from the answers. The scheduler decides on the same figures, with the tokens of the
request, which the gate estimates by the size of the body. The gate also lets those go first that
come back when they were told to (`batching.admission`).
"""

import asyncio
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from cloze.service.batching.admission import (
    DrainRate,
    PromiseKey,
    Promises,
    longest_wait_s,
    too_long,
)
from cloze.service.batching.fair_queue import LineKey
from cloze.service.core import Overloaded, Rejection, ServiceError
from cloze.service.http.record import RequestRecord, is_first_try
from cloze.service.http.routes import GateModel, Recorder

_BYTES_PER_TOKEN = 5
"""Bytes of a body per token of its texts: English words, and numbers of tokens."""

_PER_TURN = 4
"""Most requests that start per turn; a handler takes about 0.2 ms until it waits."""

_RATE_LASTS_S = 2.0
"""Time after which a measured rate is forgotten: later requests may cost less."""


_Start = tuple[RequestRecord, Callable[[], None]]
"""A request that waits, and the function that starts it."""


class Starts:
    """The requests of one process that are admitted and have not started.

    A few start per turn of the event loop, the clients by turns. The headers of thousands of
    requests may arrive in one turn. If the handlers of all of them ran in the next one, probes and
    refusals would wait for seconds.

    Attributes:
        unsubmitted: (client, line) -> tokens of requests whose handlers have not begun.
        waiting: number of requests that wait for a later turn.
    """

    def __init__(self) -> None:
        self.unsubmitted: Counter[tuple[str, LineKey]] = Counter()
        self._lines: dict[str, deque[_Start]] = {}  # by client, the next one first
        self.waiting = 0
        self._started = 0  # in this turn
        self._rate = DrainRate()
        self._measured = 0.0  # `time.monotonic` time of the last turn with a line

    def begun(self, request: RequestRecord) -> None:
        """Note that the handler of a request begins, or that its client has gone."""
        if request.unstarted is not None:
            line, tokens = request.unstarted
            request.unstarted = None
            self.unsubmitted[request.client, line] -= tokens
            if not self.unsubmitted[request.client, line]:
                del self.unsubmitted[request.client, line]

    def start(self, request: RequestRecord, begin: Callable[[], None]) -> None:
        """Start a request in this turn or later.

        Its tokens count until its handler begins, and submits them: the headers of hundreds of
        requests may arrive before the handler of the first one runs.
        """
        if request.unstarted is not None:
            line, tokens = request.unstarted
            self.unsubmitted[request.client, line] += tokens
        if self.waiting or self._started >= _PER_TURN:
            self._lines.setdefault(request.client, deque()).append((request, begin))
            self.waiting += 1
            return
        if not self._started:
            asyncio.get_running_loop().call_soon(self._turn)
        self._started += 1
        begin()

    def expected_wait_s(self, client: str) -> float:
        """Return the seconds until a request of a client that arrives now starts."""
        rate = self._rate.per_s
        if not rate or time.monotonic() - self._measured > _RATE_LASTS_S:
            return 0.0
        own = len(self._lines.get(client, ())) + 1
        clients = len(self._lines) + (own == 1)
        return min(self.waiting, own * clients) / rate

    def _turn(self) -> None:
        """Start the requests of the next turn."""
        self._started = 0
        if not self.waiting:
            return
        while self.waiting and self._started < _PER_TURN:
            client, line = next(iter(self._lines.items()))
            request, begin = line.popleft()
            del self._lines[client]
            if line:
                self._lines[client] = line  # behind the other clients
            self.waiting -= 1
            self._started += 1
            if request.connection is None:  # its client has gone
                self.begun(request)
            else:
                begin()
        self._measured = time.monotonic()
        self._rate.batch_ended(self._measured, self._started, waiting=self.waiting > 0)
        asyncio.get_running_loop().call_soon(self._turn)


class Gate:
    """Decides which requests are refused before they are parsed.

    Args:
        routes: route, as in `Paths` -> the served models, the default first.
        error_bytes: (path, error) -> the body of the error, in the shape of the path's protocol.
        max_wait_s: longest expected wait of a request that states no time limit; 0: no limit.
    """

    def __init__(
        self,
        routes: Mapping[str, Sequence[GateModel]],
        error_bytes: Callable[[str, ServiceError], bytes],
        max_wait_s: float,
        starts: Starts,
        promises: Promises,
        recorder: Recorder,
    ) -> None:
        self._routes = {  # one model per queue, the first, and the default before all
            route: [*{one.folder or one.reference: one for one in reversed(models)}.values()][::-1]
            for route, models in routes.items()
        }
        self._max_wait_s = max_wait_s
        self._starts, self._promises, self._recorder = starts, promises, recorder

        @lru_cache(4096)
        def answer(path: str, wait_s: float, limit_s: float, retry_after_s: int) -> bytes:
            message = "requests that were refused before go first"
            if wait_s:
                message = too_long(wait_s, limit_s)
            body = error_bytes(path, Overloaded(message, retry_after_s))
            head = (
                "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nretry-after: {retry_after_s}\r\n\r\n"
            )
            return head.encode() + body

        self._answer = answer

    def refusal(self, request: RequestRecord) -> bytes | None:
        """Return the response that refuses a POST request; None admits the request."""
        route, client, stated_s = request.route, request.client, request.stated_s
        if route is None or not (served := self._routes.get(route)):
            return None
        tokens = 1 + (request.length or 0) // _BYTES_PER_TOKEN
        is_bulk = request.is_bulk
        line = LineKey.of(tokens, stated_s, is_bulk=is_bulk)
        request.unstarted = line, tokens
        if request.terms_problem:  # the handler writes that error
            return None
        unstarted = self._starts.unsubmitted[client, line]
        wait, model = min(
            (each.queue.expected_wait(client, tokens, stated_s, unstarted, is_bulk), each.reference)
            for each in served
        )
        key = PromiseKey(model, client, line.patience, is_bulk)
        wait_s = wait.seconds
        if self._starts.waiting:
            wait_s += self._starts.expected_wait_s(client)
        limit_s = longest_wait_s(stated_s, self._max_wait_s)
        now = time.monotonic()
        admitted_s = limit_s / 2 if self._promises.outstanding(key, now) else limit_s
        if wait_s <= admitted_s or served[0].queue.draining:
            return None
        if not is_first_try(request.headers) and self._promises.redeem(key, now):
            request.is_returning = True
            return None
        request.unstarted = None
        after_s = self._promises.promise(key, now, wait_s - admitted_s, wait.per_request_s)
        request.model, request.error = model, Overloaded.__name__
        request.rejection = Rejection.WAIT
        self._recorder.add(request, 429)
        told_s = round(wait_s, 1) if wait_s > limit_s else 0.0
        answer = self._answer(route, told_s, limit_s, math.ceil(after_s))
        headers = b"\r\nretry-after-ms: %d\r\nx-request-id: %s\r\n\r\n"
        filled = headers % (math.ceil(after_s * 1000), request.identity)
        return answer.replace(b"\r\n\r\n", filled, 1)


class Paths:
    """The paths of a set of routes.

    A path is never decoded: ``/%65mbed`` is another path than ``/embed``, and no route. So whatever
    reads the path (the gate, the access control, the router, the metrics, and a proxy's rules
    before them) reads the same one.

    Args:
        routes: paths of routes. A part in braces stands for any text without a slash.
    """

    def __init__(self, routes: Iterable[str]) -> None:
        self._routes = frozenset(routes)
        self._patterns = {
            route: re.compile("[^/]+".join(map(re.escape, re.split(r"\{.*?\}", route))))
            for route in self._routes
            if "{" in route
        }

    def route(self, path: str) -> str | None:
        """Return the route of a path; None if there is none."""
        if path in self._routes:
            return path
        return next((route for route, p in self._patterns.items() if p.fullmatch(path)), None)
