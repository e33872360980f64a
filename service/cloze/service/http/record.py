"""Reads who sends a request, on what terms, and whether it may; records its answer or refusal."""

import logging
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from starlette.requests import Request
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloze.service import errors
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import OTHER_ROUTE, Headers, ServedRequest
from cloze.service.http.body import RequestLimits
from cloze.service.http.keys import Key, Keys, Permission
from cloze.service.http.routes import CONNECTION, RECORD, Connection, Respond
from cloze.service.observe.logs import AccessLog
from cloze.service.observe.metrics import Metrics
from cloze.service.observe.tracing import Tracing
from cloze.service.settings import address_of, is_loopback

log = logging.getLogger("cloze")

TIMEOUT_HEADER: Final = b"x-request-timeout-ms"

_READ_TIMEOUT_HEADER: Final = b"x-stainless-read-timeout"
"""Seconds that the openai client waits for an answer; it sends the header with every request."""

_SECONDS: Final = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
"""Request ids that the server accepts from a client and returns in a header."""

_FORWARDED: Final = frozenset({b"x-forwarded-for", b"forwarded", b"x-real-ip"})
"""Headers that proxies add; only the first one is read."""

_LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class Callers:
    """Reads what the headers of requests say about their clients."""

    keys: Keys | None = None  # the API keys; None: there are none
    max_timeout_s: float = 300.0  # largest time limit that a request may state
    timeout_s: float = 30.0  # time limit of a request that states none
    clock: Clock = CLOCK
    # Addresses of which the log says that they forward requests.
    told: set[str] = field(default_factory=set)

    def record(self, scope: Scope, route: str | None) -> ServedRequest:
        """Return the request of an ASGI scope, whose headers have arrived."""
        headers: Headers = scope["headers"]
        first = dict(reversed(headers))  # the first value of each header
        length = first.get(b"content-length", b"")
        identity = first.get(b"x-request-id")
        if identity is None or _REQUEST_ID.fullmatch(identity) is None:
            identity = b"%016x" % random.getrandbits(64)
        peer, key = scope.get("client"), None
        client: str = peer[0][:64] if peer else ""  # or what a trusted proxy says, cut
        connection: Connection | None = scope.get("state", {}).get(CONNECTION)
        if not _FORWARDED.isdisjoint(first) and connection and connection.address == client:
            self._tell_of_proxy(client)
        if self.keys is not None and (authorization := first.get(b"authorization")) is not None:
            key = self.keys.find(authorization)
        stated_s, terms_problem = None, ""
        if TIMEOUT_HEADER in first or _READ_TIMEOUT_HEADER in first:
            try:
                stated_s = timeout_s(first, self.max_timeout_s)
            except errors.InvalidRequest as error:
                terms_problem = error.problem
        if (stated_class := first.get(b"x-request-class")) not in (None, b"bulk"):
            got = ascii(stated_class.decode("latin-1"))[:40]
            terms_problem = f"x-request-class: bulk, or no such header, got {got}"
        arrived, limit_s = self.clock.monotonic(), self.timeout_s if stated_s is None else stated_s
        return ServedRequest(
            method=scope["method"],
            path=scope["path"],
            route=route or OTHER_ROUTE,
            headers=headers,
            first=first,
            length=int(length) if length.isdigit() and len(length) <= 20 else None,
            identity=identity,
            key=key,
            client=f"key:{key.name}" if key is not None else client,
            stated_s=stated_s,
            is_bulk=stated_class == b"bulk",
            terms_problem=terms_problem,
            arrived=arrived,
            limit_s=limit_s,
            deadline=arrived + limit_s,
            connection=connection,
        )

    def _tell_of_proxy(self, address: str) -> None:
        """Log, once per address, that all clients behind a proxy count as one."""
        if address in self.told or len(self.told) == 8:  # any client may pretend to be one
            return
        self.told.add(address)
        log.warning(
            "%s forwards requests of others, which all count as its own, with one fair share: if "
            "it is your proxy, name it in CLOZE_TRUSTED_PROXIES, and let it set X-Forwarded-For",
            address or "a client without an address",
        )


def timeout_s(headers: Mapping[bytes, bytes], most_s: float) -> float | None:
    """Return the time limit that a request states, in seconds; None if it states none.

    `TIMEOUT_HEADER` is for this server. Without it, `_READ_TIMEOUT_HEADER` counts, up to the
    largest limit.

    Raises:
        InvalidRequest: the header is no whole number of milliseconds, or above the largest limit.
    """
    if (stated := headers.get(TIMEOUT_HEADER)) is None:
        waits = headers.get(_READ_TIMEOUT_HEADER, b"")
        seconds = float(waits) if _SECONDS.fullmatch(waits) else 0.0
        return min(seconds, most_s) if seconds >= 0.001 else None
    milliseconds = int(stated) if stated.isdigit() and len(stated) < 16 else 0
    if not 1 <= milliseconds <= most_s * 1000:
        raise errors.InvalidRequest(
            f"x-request-timeout-ms: a whole number from 1 to {most_s * 1000:.0f}, "
            f"got {ascii(stated.decode('latin-1'))[:40]}"
        )
    return milliseconds / 1000


class Paths:
    """The paths of a set of routes.

    A path is never decoded: ``/%65mbed`` is another path than ``/embed``, and no route. So whatever
    reads the path (the gate, the access control, the router, the metrics, and a proxy's rules
    before them) reads the same one.

    A part of a route in braces stands for any text without a slash.
    """

    def __init__(self, routes: Iterable[str]) -> None:
        self._routes = frozenset(routes)
        # The longest first: ``/models/{model}`` also has the paths of ``/models/{model}:predict``.
        templates = sorted((route for route in self._routes if "{" in route), key=len, reverse=True)
        self._patterns = {route: compile_path(route)[0] for route in templates}

    def route(self, path: str) -> str | None:
        """Return the route of a path; None if there is none."""
        if path in self._routes:
            return path
        return next((route for route, p in self._patterns.items() if p.fullmatch(path)), None)


@dataclass(frozen=True, slots=True)
class Recorder:
    """Records the requests of one process: their metrics, their spans and their log lines.

    `respond` answers an error that nothing else has handled. `is_ending` returns whether each
    connection is to end with its next answer.
    """

    metrics: Metrics
    access_log: AccessLog
    tracing: Tracing | None
    limits: RequestLimits
    respond: Respond
    is_ending: Callable[[], bool]
    clock: Clock = CLOCK

    async def answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Let an application answer a request, add its id and its model, and record the answer."""
        record: ServedRequest = scope[RECORD]
        if self.tracing is not None:
            record.trace = self.tracing.begin(record)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.identity)]
                if record.model:
                    message["headers"].append((b"x-model", record.model.encode("ascii")))
                # A client that asks whether to send its body may send it or not after a refusal.
                if self.is_ending() or (record.received == 0 and b"expect" in record.first):
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        self.metrics.in_flight += 1
        try:
            await app(scope, receive, send_with_id)
        except Exception as error:
            # Starlette's own handler is outside of this one, so its answer would have no id.
            response = await self.respond(Request(scope), error)
            if not record.status:
                await response(scope, receive, send_with_id)
            raise  # so that uvicorn logs the traceback
        finally:
            clock = self.clock
            self.metrics.in_flight -= 1
            if record.answer is not None:
                self.limits.sent(record)
            if record.tokens and not record.texts:  # without a result it costs its key no tokens
                if record.key is not None:
                    record.key.take_tokens(-record.tokens, clock.monotonic())
                record.tokens = 0
            record.status = record.status or 500
            record.ended, record.seconds = clock.wall(), clock.monotonic() - record.arrived
            self.metrics.observe_request(record)
            if record.trace is not None:
                record.trace.end(record)
            record.release()
            self.access_log.add(record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Refuses requests without a key, and requests for another host.

    Attributes:
        needs_keys: whether the server has API keys; otherwise everybody may send requests.
        open_routes: paths whose GET needs no key: probes, and pages without data.
        permissions: (prefix of a path, what a key must allow); other paths need
            `Permission.INFERENCE`.
        hosts: names in the Host header that are accepted; empty: any. A page of another site cannot
            send requests to a server on loopback by a name of its own (DNS rebinding).
        by_address: paths that are also answered to a Host header with any IP address, which no page
            has as its name: a kubelet and a Prometheus ask a pod by its address.
    """

    needs_keys: bool
    open_routes: frozenset[str]
    permissions: Sequence[tuple[str, Permission]]
    hosts: frozenset[bytes]
    by_address: frozenset[str] = frozenset()
    clock: Clock = CLOCK

    def check(self, request: ServedRequest) -> None:
        """Raise unless a request may go on, and count it for its key.

        Raises:
            ServiceError: the host, the key, its permission or its rate is wrong, or it has expired.
        """
        by_address = request.path in self.by_address
        for name, value in request.headers if self.hosts else ():
            if name == b"host" and not is_accepted(value, self.hosts, or_address=by_address):
                raise errors.OtherHost(
                    f"the Host header {ascii(value.decode('latin-1'))[:80]} is not of this "
                    "server; name it in allowed_hosts"
                )
        key: Key | None = request.key
        path = request.path
        is_open = request.method in ("GET", "HEAD") and path in self.open_routes
        if is_open or not self.needs_keys:
            return
        fitting = (needed for begin, needed in self.permissions if path.startswith(begin))
        needed = next(fitting, Permission.INFERENCE)
        if key is None:
            raise errors.Unauthorized("send a key of this server: Authorization: Bearer KEY")
        if key.expires_before(self.clock.wall()):
            raise errors.KeyExpired(f"the key {key.name} has expired at {key.entry.expires}")
        if needed not in key.entry.scopes:
            raise errors.Forbidden(f"the key {key.name} lacks the scope {needed}")
        key.count(self.clock.monotonic())


def accepted_hosts(host: str, allowed: Sequence[str]) -> frozenset[bytes]:
    """Return the names that the Host header may have, for an address to listen on; empty: any."""
    if not allowed and not is_loopback(host):
        return frozenset()
    own = f"[{host}]" if ":" in host else host
    return frozenset(name.lower().encode() for name in (*_LOOPBACK_NAMES, *(allowed or [own])))


@lru_cache(64)  # a client sends the same one with each request
def is_accepted(value: bytes, hosts: frozenset[bytes], *, or_address: bool = False) -> bool:
    """Return whether the value of a Host header names one of the hosts, with or without a port.

    With `or_address`, any IP address is accepted too.
    """
    name = value.strip().lower()
    is_ipv6 = name.startswith(b"[")
    host = name.partition(b"]")[0] + b"]" if is_ipv6 else name.partition(b":")[0]
    if host in hosts or not or_address:
        return host in hosts
    return address_of(host.decode("latin-1")[is_ipv6 : len(host) - is_ipv6]) is not None
