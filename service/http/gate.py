"""Refuses requests of a full server before their bodies are parsed.

Without the gate, a refusal costs almost as much as an answer, and under an overload refusals take
the processor from the answers. The scheduler decides on the same figures, with the tokens of the
request, which the gate estimates by the size of the body. The gate also lets those go first that
come back when they were told to (`batching.admission`).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from starlette.types import Scope

from cloze.service.batching.admission import PromiseKey, Promises, longest_wait_s, too_long
from cloze.service.batching.lines import LineKey
from cloze.service.core import (
    InvalidRequest,
    Overloaded,
    Queue,
    Rejection,
    ServiceError,
)
from cloze.service.http.caller import Callers, is_first_try, request_id, timeout_s
from cloze.service.http.paths import Paths
from cloze.service.http.starts import Starts
from cloze.service.logs import AccessLog, AccessRecord
from cloze.service.metrics import Metrics

ErrorBytes = Callable[[str, ServiceError], bytes]
"""(path, error) -> the body of the error, in the shape of the path's protocol."""


_PASSED = "cloze.passed"
"""Key of a scope: calls back the gate that has admitted the request."""

CLIENT = "cloze.client"
"""Key of a scope: the client of an admitted request."""

ARRIVED = "cloze.arrived"
"""Key of a scope: `time.monotonic` time at which a request arrived that had to wait to start."""


RETURNING = "cloze.returning"
"""Key of a scope: whether the request comes back when a refusal said so."""

_BYTES_PER_TOKEN = 5
"""Bytes of a body per token of its texts: English words, and numbers of tokens."""


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
        promises: when refused requests of the process may come back.
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
        promises: Promises,
        callers: Callers,
        metrics: Metrics,
        access_log: AccessLog,
    ) -> None:
        self._routes = routes
        self._paths = Paths(routes)
        self._limits = limits
        self._starts, self._promises = starts, promises
        self._callers = callers
        self._metrics, self._access_log = metrics, access_log
        # (client, line) -> tokens of requests whose handlers wait to run
        self._unstarted: dict[tuple[str, LineKey], int] = {}

        @lru_cache(4096)
        def answer(path: str, message: str, retry_after_s: int) -> bytes:
            body = error_bytes(path, Overloaded(message, retry_after_s))
            head = (
                "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nretry-after: {retry_after_s}\r\n\r\n"
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
        tokens = 1 + _content_length(scope) // _BYTES_PER_TOKEN
        try:
            stated_s = timeout_s(scope, self._limits.max_timeout_s)
        except InvalidRequest:  # the handler writes that error
            self._admit(scope, client, LineKey.of(tokens, None), tokens)
            return None
        line = LineKey.of(tokens, stated_s)
        unstarted = self._unstarted.get((client, line), 0)
        wait, model = min(
            (each.queue.expected_wait(client, tokens, stated_s, unstarted), each.reference)
            for each in served
        )
        key = PromiseKey(model, client, line.patience)
        wait_s = wait.seconds + self._starts.expected_wait_s(client)
        limit_s = longest_wait_s(stated_s, self._limits.max_wait_s)
        now = time.monotonic()
        admitted_s = limit_s / 2 if self._promises.outstanding(key, now) else limit_s
        if wait_s <= admitted_s or served[0].queue.draining:
            self._admit(scope, client, line, tokens)
            return None
        if not is_first_try(scope) and self._promises.redeem(key, now):
            scope[RETURNING] = True
            self._admit(scope, client, line, tokens)
            return None
        after_s = self._promises.promise(key, now, wait_s - admitted_s, wait.per_request_s)
        identity = request_id(scope)
        self._record(path, model, identity)
        message = (
            too_long(round(wait_s, 1), limit_s)
            if wait_s > limit_s
            else "requests that were refused before go first"
        )
        answer = self._answer(path, message, math.ceil(after_s))
        headers = b"\r\nretry-after-ms: %d\r\nx-request-id: %s\r\n\r\n"
        return answer.replace(b"\r\n\r\n", headers % (math.ceil(after_s * 1000), identity), 1)

    def _admit(self, scope: Scope, client: str, line: LineKey, tokens: int) -> None:
        """Let a request pass, and count its tokens until its handler begins."""
        self._unstarted[client, line] = self._unstarted.get((client, line), 0) + tokens
        scope[_PASSED] = partial(self._started, client, line, tokens)
        scope[CLIENT] = client

    def _started(self, client: str, line: LineKey, tokens: int) -> None:
        self._unstarted[client, line] -= tokens
        if not self._unstarted[client, line]:
            del self._unstarted[client, line]

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


def _content_length(scope: Scope) -> int:
    """Return the bytes of a request's body; 0 if the headers do not say so."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() and len(value) < 16 else 0
    return 0
