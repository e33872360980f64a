"""Refuses requests of a full server before their bodies are parsed.

Without the gate, a refusal costs almost as much as an answer, and under an overload refusals take
the processor from the answers. The scheduler decides on the same figures, with the tokens of the
request, so the gate refuses nothing that the scheduler would admit.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from starlette.types import Scope

from cloze.service.core import InvalidRequest, Overloaded, Queue, Rejection, ServiceError
from cloze.service.http.access_log import AccessLog, AccessRecord
from cloze.service.http.caller import Callers, request_id, timeout_s
from cloze.service.http.paths import Paths
from cloze.service.http.starts import Starts
from cloze.service.metrics import Metrics

ErrorBytes = Callable[[str, ServiceError], bytes]
"""(path, error) -> the body of the error, in the shape of the path's protocol."""


_PASSED = "cloze.passed"
"""Key of a scope: calls back the gate that has admitted the request."""

CLIENT = "cloze.client"
"""Key of a scope: the client of an admitted request."""

ARRIVED = "cloze.arrived"
"""Key of a scope: `time.monotonic` time at which a request arrived that had to wait to start."""


class GateModel(NamedTuple):
    """A served model of a route: its full name and its queue."""

    reference: str
    queue: Queue


class GateLimits(NamedTuple):
    """The limits of a gate.

    Attributes:
        max_wait_s: longest expected wait of a request that states no time limit; 0: no limit.
        max_timeout_s: longest time limit that a request may state.
    """

    max_wait_s: float
    max_timeout_s: float


class Gate:
    """Decides which requests are refused before they are parsed.

    Args:
        routes: route, as in `Paths` -> the served models, the default first.
        error_bytes: writes the body of a refusal.
        limits: the limits of waiting.
        starts: the requests of the process that have not started.
        callers: names the clients of requests.
        metrics: records refusals.
        access_log: logs refusals.
    """

    def __init__(
        self,
        routes: Mapping[str, Sequence[GateModel]],
        error_bytes: ErrorBytes,
        limits: GateLimits,
        starts: Starts,
        callers: Callers,
        metrics: Metrics,
        access_log: AccessLog,
    ) -> None:
        self._routes = routes
        self._paths = Paths(routes)
        self._limits = limits
        self._starts = starts
        self._callers = callers
        self._metrics, self._access_log = metrics, access_log
        self._unstarted: dict[str, int] = {}  # client -> requests whose handlers wait to run

        @lru_cache(4096)
        def answer(path: str, wait_s: int, limit_s: float) -> bytes:
            message = f"the request would wait about {wait_s} s, longer than its limit of "
            body = error_bytes(path, Overloaded(f"{message}{limit_s:g} s", wait_s))
            head = (
                "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nretry-after: {wait_s}\r\n\r\n"
            )
            return head.encode() + body

        self._answer = answer

    def refusal(self, scope: Scope) -> bytes | None:
        """Return the response that refuses a request; None admits the request.

        Args:
            scope: a POST request whose headers have arrived.
        """
        path = self._paths.route(scope["path"])
        if path is None or not (served := self._routes[path]):
            return None
        client = self._callers.name(scope)
        waiting = self._unstarted.get(client, 0)
        limit_s = self._limits.max_wait_s or math.inf
        wait_s = self._starts.expected_wait_s(client)
        wait_s += min(model.queue.expected_wait_s(client, unsubmitted=waiting) for model in served)
        if wait_s > limit_s:
            try:
                limit_s = timeout_s(scope, self._limits.max_timeout_s) or limit_s
            except InvalidRequest:
                limit_s = math.inf  # the handler writes that error
        if wait_s <= limit_s or served[0].queue.draining:
            self._unstarted[client] = waiting + 1
            scope[_PASSED] = partial(self._started, client)
            scope[CLIENT] = client
            return None
        identity = request_id(scope)
        self._record(path, served[0].reference, identity)
        answer = self._answer(path, math.ceil(wait_s), limit_s)
        return answer.replace(b"\r\n\r\n", b"\r\nx-request-id: %s\r\n\r\n" % identity, 1)

    def _started(self, client: str) -> None:
        self._unstarted[client] -= 1
        if not self._unstarted[client]:
            del self._unstarted[client]

    def _record(self, path: str, model: str, identity: bytes) -> None:
        self._metrics.observe_request(path, model, 429, 0.0)
        self._metrics.observe_rejection(Rejection.WAIT)
        self._access_log.add(
            AccessRecord(
                time.time(), identity.decode(), "POST", path, model, 429, 0.0, None, "Overloaded"
            )
        )


def note_start(scope: Scope) -> None:
    """Note that the handler of a request begins, and will submit the request.

    The headers of hundreds of requests may arrive in one turn of the event loop, before the handler
    of the first one runs.
    """
    if (started := scope.pop(_PASSED, None)) is not None:
        started()
