"""Decides which requests are refused before their bodies are parsed, and when the others start.

Without the gate, a refusal costs almost as much as an answer, and under an overload refusals take
the processor from the answers. The scheduler decides on the same figures, with the tokens of the
request, which the gate estimates by the size of the body.

A refused request is told when to come back, one after another. A connection that does not wait gets
its next refusal late, so that a storm of requests costs timers instead of processor time.
"""

import asyncio
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from cloze.service.batching.admission import DrainRate, WaitLimits
from cloze.service.batching.fair_queue import LineKey
from cloze.service.core import ExpectedWait, Overloaded, Rejection, ServiceError
from cloze.service.http.memory_limit import Reader
from cloze.service.http.record import RequestRecord
from cloze.service.http.routes import GateModel, Recorder

_BYTES_PER_TOKEN = 5
"""Bytes of a body per token of its texts: English words, and numbers of tokens."""

_PER_TURN = 4
"""Most requests that start per turn; a handler takes about 0.2 ms until it waits."""

_RATE_LASTS_S = 2.0
"""Time after which a measured rate is forgotten: later requests may cost less."""


_SHARE_OF_NEW = 0.5
"""Share of the limits for new requests while refused ones are due to come back.

The rest is for those, which may come in bursts, since `Retry-After` has whole seconds. With three
quarters, 84 % of 1,000 connections that wait are admitted when they come back, with half 100 %.
"""

_SHARE_OF_STATED = 0.95
"""Share of a stated time limit that is left when the queue decides.

A request that passes the gate and is refused by the queue costs ten times as much.
"""

_EARLY_S = 0.005
"""How much earlier than told a client may come; timers and clocks are not exact."""

_SHORTEST_TOLD_S = 0.05
"""Shortest time after which a client is told to come back."""

_LONGEST_TOLD_S = 60.0
"""Longest time after which a client is told to come back; the openai client waits for no longer."""

_FIRST_HOLD_S = 0.25
"""How long the first refusal is held that a connection gets too early; doubles with each one."""

_LONGEST_HOLD_S = 1.0

_MOST_LINES = 4096
"""Most lines whose next time is kept."""

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
        self._rate.batch_ended(self._measured, self._started, waiting=self.waiting > 0)
        asyncio.get_running_loop().call_soon(self._turn)


class RefusedLine(NamedTuple):
    """Which refused requests come back one after another: those of a client and of one reason.

    Attributes:
        model: full name of the model whose queue refused them.
        patience: see `LineKey`.
    """

    reason: Rejection
    model: str
    client: str
    patience: int
    is_bulk: bool


@dataclass(slots=True)
class _Refused:
    """The last refusal of a connection.

    Attributes:
        at: `time.monotonic` time at which the connection was told to come back.
        moved_s: seconds by which the refusal moved the latest time of its line.
        early: number of refusals that the connection did not wait for; halved when it waits.
        over: arrival of the request that the gate has admitted since, or None.
    """

    line: RefusedLine
    at: float
    moved_s: float
    early: int = 0
    over: float | None = None


class Returns:
    """When refused requests may come back: one after another, as fast as their line is worked off.

    Nothing is kept for a request that does not come back: a time passes, and a connection that
    closes or is admitted gives its time back. Each connection has one time, however often it asks.

    For example, a line works off 40 requests per second and has room in 0.1 s. The first connection
    that is refused is told 0.1 s, the next ones 0.125 s and 0.15 s.

    The class is not safe for threads: the event loop of the process makes every call.

    Args:
        processes: number of processes that refuse requests of the same lines.
    """

    def __init__(self, processes: int = 1) -> None:
        self._processes = processes
        self._last: dict[RefusedLine, float] = {}  # the latest time that was told
        self._refused: dict[Reader, _Refused] = {}

    def share(self, connection: Reader | None, line: RefusedLine, now: float) -> float:
        """Return the share of the limits that a request may use; all if it comes back as told."""
        if self._last.get(line, 0.0) <= now:
            return 1.0
        refused = None if connection is None else self._refused.get(connection)
        if refused is None or refused.line != line or refused.over is not None:
            return _SHARE_OF_NEW
        return 1.0 if now >= refused.at - _EARLY_S else _SHARE_OF_NEW

    def refuse(
        self, request: RequestRecord, line: RefusedLine, now: float, room_s: float, each_s: float
    ) -> tuple[float, float]:
        """Return when a refused request may come back, and how long its refusal is to be held.

        Args:
            request: the request.
            line: the line that refused the request.
            now: `time.monotonic` time.
            room_s: seconds until the line has room.
            each_s: seconds in which the line works off one such request.

        Returns:
            Two numbers of seconds.
        """
        connection = request.connection
        before = None if connection is None else self._refused.get(connection)
        if before is not None and before.over not in (None, request.arrived):
            before = None
        early, hold_s = 0, 0.0
        if before is not None:
            early = before.early // 2
            if before.line.client == line.client and now < before.at - _EARLY_S:
                hold_s = min(_FIRST_HOLD_S * 2**before.early, _LONGEST_HOLD_S)
                early = min(before.early + 1, 16)
                if before.line == line and before.over is None:
                    before.early = early
                    return max(before.at - now, room_s), hold_s
        self._give_back(connection, now)
        if len(self._last) >= _MOST_LINES:
            self._last.clear()
        last = self._last.get(line, 0.0)
        at = now + max(room_s, _SHORTEST_TOLD_S)
        if line.reason is not Rejection.KEY_LIMIT:  # whose time is exact, and may be long
            if last > now:
                at = max(at, last + each_s * self._processes)
            at = min(at, now + _LONGEST_TOLD_S)
        moved_s = max(0.0, at - max(last, now))
        self._last[line] = max(last, at)
        if connection is not None:
            self._refused[connection] = _Refused(line, at, moved_s, early)
        return at - now, hold_s

    def admitted(self, request: RequestRecord) -> None:
        """Note that the gate admits a request; if it comes early, its time is given back."""
        refused = None if request.connection is None else self._refused.get(request.connection)
        if refused is not None and refused.over is None:
            self._give_back(request.connection, request.arrived)
            refused.over = request.arrived

    def closed(self, connection: Reader, now: float) -> None:
        """Forget a connection, and give its time back."""
        self._give_back(connection, now)
        self._refused.pop(connection, None)

    def _give_back(self, connection: Reader | None, now: float) -> None:
        refused = None if connection is None else self._refused.get(connection)
        if refused is not None and refused.at > now and refused.line in self._last:
            self._last[refused.line] -= refused.moved_s
            refused.moved_s = 0.0


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
        wait = ExpectedWait(
            wait.seconds + (self._starts.expected_wait_s(client) if self._starts.waiting else 0.0),
            wait.per_request_s,
            wait.requests + self._starts.requests[client],
        )
        key = RefusedLine(Rejection.WAIT, model, client, line.patience, is_bulk)
        limits, now = self._limits, request.arrived
        share = self._returns.share(request.connection, key, now)
        if stated_s is not None:
            share *= _SHARE_OF_STATED
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
