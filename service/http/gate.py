"""Decides which requests are refused before their bodies are parsed, and when the others start.

Without the gate, a refusal costs almost as much as an answer, and under an overload refusals take
the processor from the answers. The scheduler decides on the same figures, with the tokens of the
request, which the gate estimates by the size of the body.

A refused request is told when to come back; see `Returns`.
"""

import asyncio
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from cloze.service.batching.admission import DrainRate, WaitLimits
from cloze.service.core import ExpectedWait, LineKey, Overloaded, Rejection, ServiceError
from cloze.service.http.record import RequestRecord
from cloze.service.http.returns import RefusedLine, Returns
from cloze.service.http.routes import GateModel, Recorder

_BYTES_PER_TOKEN = 5.0
"""Bytes of a body per token of its texts before an answer says more: English words."""

_BYTES_OF_A_TOKEN = (2.0, 16.0)
"""What one answer may say at least and at most: a text that is cut has bytes without tokens."""

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
        requests: client -> number of these requests.
        waiting: number of requests that wait for a later turn.
    """

    def __init__(self) -> None:
        self.unsubmitted: Counter[tuple[str, LineKey]] = Counter()
        self.requests: Counter[str] = Counter()
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
            self.requests[request.client] -= 1
            self.unsubmitted[request.client, line] -= tokens
            if not self.unsubmitted[request.client, line]:
                del self.unsubmitted[request.client, line]
            if not self.requests[request.client]:
                del self.requests[request.client]

    def start(self, request: RequestRecord, begin: Callable[[], None]) -> None:
        """Start a request in this turn or later.

        Its tokens count until its handler begins, and submits them: the headers of hundreds of
        requests may arrive before the handler of the first one runs.
        """
        if request.unstarted is not None:
            line, tokens = request.unstarted
            self.unsubmitted[request.client, line] += tokens
            self.requests[request.client] += 1
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
        self._rate.count(self._measured, self._started, waiting=self.waiting > 0)
        asyncio.get_running_loop().call_soon(self._turn)


class Refusal(NamedTuple):
    """The response that refuses a request, and the seconds for which it is to be held."""

    answer: bytes
    hold_s: float


class Gate:
    """Decides which requests are refused before they are parsed.

    The body names the model, and the gate sees only the head. So it refuses a request only if the
    line of each model of the route is full.

    Args:
        routes: route, as in `Paths` -> the served models, the default first.
        error_bytes: (path, error) -> the body of the error, in the shape of the path's protocol.
        limits: how long requests may wait.
    """

    def __init__(
        self,
        routes: Mapping[str, Sequence[GateModel]],
        error_bytes: Callable[[str, ServiceError], bytes],
        limits: WaitLimits,
        starts: Starts,
        returns: Returns,
        recorder: Recorder,
    ) -> None:
        self._routes = {  # one model per queue, the first, and the default before all
            route: [*{one.folder or one.reference: one for one in reversed(models)}.values()][::-1]
            for route, models in routes.items()
        }
        self._limits, self._starts, self._returns = limits, starts, returns
        self._recorder = recorder
        self._bytes_per_token: dict[str, float] = {}  # by route, a moving average of answers

        @lru_cache(4096)
        def answer(path: str, message: str, retry_after_s: int) -> bytes:
            body = error_bytes(path, Overloaded(message, retry_after_s))
            head = (
                "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nretry-after: {retry_after_s}\r\n\r\n"
            )
            return head.encode() + body

        self._answer = answer

    def refusal(self, request: RequestRecord) -> Refusal | None:
        """Return the refusal of a POST request; None admits the request."""
        route, client, stated_s = request.route, request.client, request.stated_s
        if route is None or not (served := self._routes.get(route)):
            return None
        each = self._bytes_per_token.get(route, _BYTES_PER_TOKEN)
        tokens = 1 + int((request.length or 0) / each)
        is_bulk = request.is_bulk
        line = LineKey.of(tokens, stated_s, is_bulk=is_bulk)
        request.unstarted = line, tokens
        if request.terms_problem:  # the handler writes that error
            return None
        unstarted = self._starts.unsubmitted[client, line]
        wait, model = min(
            (each.queue.expected_wait(client, line, tokens, unstarted), each.reference)
            for each in served
        )
        wait = ExpectedWait(
            wait.seconds + (self._starts.expected_wait_s(client) if self._starts.waiting else 0.0),
            wait.per_request_s,
            wait.requests + self._starts.requests[client],
        )
        key = RefusedLine(Rejection.WAIT, model, client, line.patience, is_bulk)
        limits, now = self._limits, request.arrived
        share = self._returns.share(request.connection, key, now)
        excess_s = partial(limits.excess_s, wait, stated_s, is_bulk=is_bulk)
        if served[0].queue.draining or excess_s(share=share) <= 0:
            self._returns.admitted(request)
            return None
        request.unstarted = None
        room_s = excess_s()
        message = "requests that were refused before go first"
        if room_s > 0:
            message = limits.describe_excess(wait, stated_s)
        after_s, hold_s = self._returns.refuse(
            request, key, now, max(0.0, room_s), wait.per_request_s
        )
        request.model, request.error = model, Overloaded.__name__
        request.rejection = Rejection.WAIT
        self._recorder.add(request, 429)
        after_s = max(0.001, after_s - hold_s)
        answer = self._answer(route, message, math.ceil(after_s))
        headers = b"\r\nretry-after-ms: %d\r\nx-request-id: %s\r\n\r\n"
        filled = headers % (math.ceil(after_s * 1000), request.identity)
        return Refusal(answer.replace(b"\r\n\r\n", filled, 1), hold_s)

    def answered(self, request: RequestRecord) -> None:
        """Learn from an answer how many bytes of a body there are per token.

        A wrong number leads to the wrong class of size, whose line may be empty. Then requests pass
        the gate that the queue refuses.
        """
        route, cost = request.route, request.cost
        if route is None or cost is None or not cost.tokens or not request.length:
            return
        if b"content-encoding" not in request.first:
            least, most = _BYTES_OF_A_TOKEN
            one = min(max(request.length / cost.tokens, least), most)
            mean = self._bytes_per_token.get(route, one)
            self._bytes_per_token[route] = mean + 0.05 * (one - mean)

    async def spread(self, request: RequestRecord, error: Overloaded) -> None:
        """Set when a request may come back that was refused later, and hold its refusal."""
        patience = LineKey.of(0, request.stated_s).patience
        client, is_bulk = request.client, request.is_bulk
        line = RefusedLine(error.reason, request.model, client, patience, is_bulk)
        after_s, hold_s = self._returns.refuse(
            request, line, time.monotonic(), error.retry_after_s, error.each_s
        )
        error.retry_after_s = after_s - hold_s
        if hold_s:
            # The frames of the traceback refer to the body.
            error.__traceback__ = error.__context__ = None
            await asyncio.sleep(hold_s)


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
