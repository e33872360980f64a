"""The door of the application: who may enter, who is refused because the server is full, who waits.

Without the door, a refusal costs almost as much as an answer, and under an overload refusals take
the processor from the answers. The scheduler decides on the same figures, with the tokens of the
request, which the door estimates by the size of the body.

A refused request is told when to come back; see `Returns`.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cloze.service import errors
from cloze.service.batching.admission import DrainRate, WaitLimits
from cloze.service.batching.fair_queue import ExpectedWait, LineKey
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import ServedRequest
from cloze.service.http.record import Access
from cloze.service.http.returns import RefusedLine, Returns
from cloze.service.http.routes import RECORD, GateModel, Handler, Respond

_PER_TURN: Final = 4
"""Most requests that start per turn; a handler takes about 0.2 ms until it waits."""


class StartQueue:
    """The requests of one process that are admitted and have not started.

    A few start per turn of the event loop, the clients by turns. The headers of thousands of
    requests may arrive in one turn. If the handlers of all of them ran in the next one, probes and
    refusals would wait for seconds.

    For example, with 4 per turn, a client whose 100 requests arrived before the one of another
    client has started 4 of them when that one starts.

    Attributes:
        unsubmitted: (client, line) -> tokens of these requests.
        waiting: number of requests that wait for a later turn.
        is_closed: whether the process drains, and admits no further request.
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self.clock = clock
        self.unsubmitted: Counter[tuple[str, LineKey]] = Counter()
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # by client, the next one first
        self.waiting = 0
        self.is_closed = False
        self._started = 0  # in this turn
        self._rate = DrainRate()
        self._measured = 0.0  # `Clock.monotonic` time of the last turn with a line

    async def wait(self, client: str, line: LineKey, tokens: int) -> None:
        """Wait for the turn of a request, whose tokens count meanwhile."""
        if not self.waiting and self._started < _PER_TURN:
            if not self._started:
                asyncio.get_running_loop().call_soon(self._turn)
            self._started += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(turn)
        self.waiting += 1
        self.unsubmitted[client, line] += tokens
        try:
            await turn
        finally:
            self.unsubmitted[client, line] -= tokens
            if not self.unsubmitted[client, line]:
                del self.unsubmitted[client, line]

    def with_start(self, wait: ExpectedWait, client: str) -> ExpectedWait:
        """Return an expected wait of a client's next request, with the time until it starts."""
        own, seconds = len(self._lines.get(client, ())), wait.seconds
        # An older rate is forgotten: later requests may cost less.
        if (rate := self._rate.per_s) and self.clock.monotonic() <= self._measured + 2.0:
            clients = len(self._lines) + (own == 0)
            seconds += min(self.waiting, (own + 1) * clients) / rate
        return wait._replace(seconds=seconds, requests=wait.requests + own)

    def _turn(self) -> None:
        self._started = 0
        if not self.waiting:
            return
        while self.waiting and self._started < _PER_TURN:
            client, line = next(iter(self._lines.items()))
            turn = line.popleft()
            del self._lines[client]
            if line:
                self._lines[client] = line  # behind the other clients
            self.waiting -= 1
            self._started += 1
            if not turn.done():
                turn.set_result(None)
        self._measured = self.clock.monotonic()
        self._rate.count(self._measured, self._started, waiting=self.waiting > 0)
        asyncio.get_running_loop().call_soon(self._turn)


class Gate:
    """Decides which requests wait for a model.

    The body names the model, and the gate sees only the head. So it refuses a request only if the
    line of each model of the route is full.

    `routes` has the served models of each route, the default first.
    """

    def __init__(
        self,
        routes: Mapping[str, Sequence[GateModel]],
        limits: WaitLimits,
        starts: StartQueue,
        returns: Returns,
    ) -> None:
        self._routes = {  # one model per queue, the first, and the default before all
            route: [*{one.folder or one.reference: one for one in reversed(models)}.values()][::-1]
            for route, models in routes.items()
        }
        self._limits, self._starts, self._returns = limits, starts, returns
        self._bytes_per_token: dict[str, float] = {}  # by route, a moving average of answers

    async def pass_through(self, request: ServedRequest) -> None:
        """Let a request wait for its turn, or refuse it.

        Raises:
            Overloaded: the request would wait for too long, or others were refused before it.
            ShuttingDown: the server drains.
        """
        served = self._routes.get(request.route)
        if not served:
            return
        if self._starts.is_closed:
            raise errors.ShuttingDown("the server is shutting down")
        client = request.client
        each = self._bytes_per_token.get(request.route, 5.0)  # at first as of English words
        tokens = 1 + int((request.length or 0) / each)
        line = LineKey.of(tokens, request.stated_s, is_bulk=request.is_bulk)
        if not request.terms_problem:  # else the handler writes that error
            unstarted = self._starts.unsubmitted[client, line]
            wait, number = min(
                (one.queue.expected_wait(client, line, tokens, unstarted), number)
                for number, one in enumerate(served)
            )
            if wait.seconds or self._starts.waiting or self._returns.refused:
                self._check(request, served[number], wait, line, tokens)
        await self._starts.wait(client, line, tokens)

    def _check(
        self,
        request: ServedRequest,
        model: GateModel,
        wait: ExpectedWait,
        size: LineKey,
        tokens: int,
    ) -> None:
        """Raise `Overloaded` if a request may not wait so long, or others come before it.

        `model` has the shortest queue, where the request would wait.
        """
        limits, starts, returns = self._limits, self._starts, self._returns
        if starts.waiting:
            wait = starts.with_start(wait, request.client)
        excess_s = partial(limits.excess_s, wait, request.stated_s, is_bulk=request.is_bulk)
        line = _refused_line(request, model.reference, errors.Rejection.WAIT)
        before = returns.before(request.connection, line, request.arrived)
        if excess_s(before=before) <= 0:
            returns.admitted(request)
            return
        request.model = model.reference
        room_s = excess_s()
        message = "requests that were refused before go first"
        if room_s > 0:
            message = limits.describe_excess(wait, request.stated_s)
        each_s = wait.per_request_s
        if before:  # as if those waited that come before it
            wait = model.queue.expected_wait(request.client, size, tokens, before * tokens)
            each_s = min(each_s, wait.per_request_s)
        raise errors.Overloaded(message, max(0.0, room_s), errors.Rejection.WAIT, each_s)

    async def refused(self, request: ServedRequest, error: errors.Overloaded) -> None:
        """Set when a refused request may come back, and hold its refusal."""
        line = _refused_line(request, request.model, error.reason)
        after_s, hold_s = self._returns.refuse(
            request, line, self._starts.clock.monotonic(), error.retry_after_s, error.each_s
        )
        error.retry_after_s = after_s - hold_s
        error.__traceback__ = error.__context__ = None  # frames refer to the body and the error
        if hold_s:
            await asyncio.sleep(hold_s)

    def answered(self, request: ServedRequest) -> None:
        """Learn from an answer how many bytes of a body there are per token.

        A wrong number leads to the wrong class of size, whose line may be empty. Then requests pass
        the gate that the queue refuses.
        """
        if not (request.texts and request.tokens and request.length):
            return  # it has no result, or no text
        if b"content-encoding" in request.first:
            return
        # Bounded, since a text that is cut has bytes without tokens.
        one = min(max(request.length / request.tokens, 2.0), 16.0)
        mean = self._bytes_per_token.get(request.route, one)
        self._bytes_per_token[request.route] = mean + 0.05 * (one - mean)


def _refused_line(request: ServedRequest, model: str, reason: errors.Rejection) -> RefusedLine:
    patience = LineKey.of(0, request.stated_s).patience
    return RefusedLine(reason, model, request.client, patience, request.is_bulk)


@dataclass(frozen=True, slots=True)
class Door:
    """The ASGI application of all routes, which calls the handlers of most without a router.

    `docs/decisions/0007` has the measured difference.

    `handlers` has the handlers of routes without parameters in their path, by method and path;
    `router` answers all other requests.
    """

    access: Access
    gate: Gate
    router: ASGIApp
    handlers: Mapping[tuple[str, str], Handler]
    respond: Respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request, record = Request(scope, receive), scope[RECORD]
        handler = self.handlers.get((record.method, record.path))
        try:
            self.access.check(record)
            if record.method == "POST":
                await self.gate.pass_through(record)
            if handler is None:
                await self.router(scope, receive, send)
                self.gate.answered(record)
                return
            response = await handler(request)
            self.gate.answered(record)
        except errors.ServiceError as error:
            response = await self.respond(request, error)
        await response(scope, receive, send)
