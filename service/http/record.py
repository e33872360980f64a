"""The record of a request: who sends it, what it asks for, and whether it may be sent."""

import ipaddress
import logging
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from starlette.types import Scope

from cloze.service.batching.fair_queue import LineKey
from cloze.service.core import Forbidden, InvalidRequest, Rejection, Unauthorized
from cloze.service.http.keys import Key, Keys, Permission
from cloze.service.http.memory_limit import Hold, Reader
from cloze.service.observe.logs import RequestCost
from cloze.service.observe.tracing import RequestTrace

log = logging.getLogger("cloze")

RECORD: Final = "cloze.record"
"""Key of an ASGI scope: the `RequestRecord` of the request."""

TIMEOUT_HEADER: Final = b"x-request-timeout-ms"

CLASS_HEADER: Final = b"x-request-class"

_READ_TIMEOUT_HEADER: Final = b"x-stainless-read-timeout"
"""Seconds that the openai client waits for an answer; it sends the header with every request."""

_SECONDS: Final = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
"""Request ids that the server accepts from a client and returns in a header."""

_FORWARDED: Final = frozenset({b"x-forwarded-for", b"forwarded", b"x-real-ip"})
"""Headers that proxies add; only the first one is read."""

_MOST_TOLD: Final = 8
"""Most addresses of which the log says that they forward requests; any client may pretend to."""

_LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")

Headers = list[tuple[bytes, bytes]]
"""The headers of a request, with names in lower case."""


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord:
    """What is noted of one request, from the end of its headers to the end of its answer.

    The headers say the first part, and `Callers.record` fills it. The second part is noted later.

    Attributes:
        path: as it was sent; a path is never decoded, see `Paths`.
        first: the first value of each header.
        length: the bytes of its body that the headers announce.
        client: the client, which has a fair share and limits: ``key:NAME`` or an address; "" if
            it is unknown.
        stated_s: the time limit that it states, in seconds.
        is_bulk: whether it takes only what others leave.
        terms_problem: what is wrong with the stated time limit or class; "" if nothing is.
        arrived: `time.monotonic` time at which its headers had arrived and its turn had come.

        connection: the connection that it came by; None if that is closed.
        unstarted: its line and its estimated tokens, from its admission by the gate to the begin of
            its handler.
        model: full name of the model; "" if none was chosen.
        error: the kind of error; "" for a result.
        rejection: why the server's own state let it fail.
        hold: the memory that its answer holds.
        charged: tokens that were taken from the limit of its key.
    """

    method: str
    path: str
    route: str | None
    headers: Headers
    first: Mapping[bytes, bytes]
    length: int | None
    identity: bytes
    key: Key | None
    client: str
    stated_s: float | None
    is_bulk: bool
    terms_problem: str
    arrived: float

    connection: Reader | None = None
    unstarted: tuple[LineKey, int] | None = None
    trace: RequestTrace | None = None
    model: str = ""
    cost: RequestCost | None = None
    error: str = ""
    rejection: Rejection | None = None
    hold: Hold | None = None
    charged: int = 0

    def charge(self, tokens: int) -> None:
        """Take tokens from the limit of its key; a negative number gives them back."""
        assert self.key is not None  # else nobody is charged
        self.charged += tokens
        self.key.take_tokens(tokens, time.monotonic())


class Callers:
    """Reads what the headers of requests say about their clients.

    Args:
        trusted_proxies: addresses and networks whose ``X-Forwarded-For`` is believed.
        keys: the API keys; None: there are none.
        max_timeout_s: largest time limit that a request may state.

    Raises:
        ValueError: a string is neither an address nor a network.
    """

    def __init__(
        self,
        trusted_proxies: Sequence[str] = (),
        keys: Keys | None = None,
        max_timeout_s: float = 300.0,
    ) -> None:
        self.keys = keys
        self._max_timeout_s = max_timeout_s
        self._trusted = [ipaddress.ip_network(proxy, strict=False) for proxy in trusted_proxies]
        self._trusts = lru_cache(1024)(self._is_trusted)
        self._told: set[str] = set()

    def record(self, scope: Scope, route: str | None) -> RequestRecord:
        """Return the record of a request whose headers have arrived."""
        headers: Headers = scope["headers"]
        first = dict(reversed(headers))  # the first value of each header
        length = first.get(b"content-length", b"")
        identity = first.get(b"x-request-id")
        if identity is None or _REQUEST_ID.fullmatch(identity) is None:
            identity = b"%016x" % random.getrandbits(64)
        peer, key = scope.get("client"), None
        address: str = peer[0] if peer else ""
        trusted = bool(self._trusted) and self._trusts(address)
        client = self._forwarded(headers, address) if trusted else address
        if client == address and not _FORWARDED.isdisjoint(first):
            self._tell_of_proxy(address)
        if self.keys is not None and (authorization := first.get(b"authorization")) is not None:
            key = self.keys.find(authorization)
        stated_s, terms_problem = None, ""
        if TIMEOUT_HEADER in first or _READ_TIMEOUT_HEADER in first:
            try:
                stated_s = timeout_s(first, self._max_timeout_s)
            except InvalidRequest as error:
                terms_problem = error.problem
        if (stated_class := first.get(CLASS_HEADER)) not in (None, b"bulk"):
            got = ascii(stated_class.decode("latin-1"))[:40]
            terms_problem = f"x-request-class: bulk, or no such header, got {got}"
        return RequestRecord(
            method=scope["method"],
            path=scope["path"],
            route=route,
            headers=headers,
            first=first,
            length=int(length) if length.isdigit() and len(length) <= 20 else None,
            identity=identity,
            key=key,
            client=f"key:{key.name}" if key is not None else client,
            stated_s=stated_s,
            is_bulk=stated_class == b"bulk",
            terms_problem=terms_problem,
            arrived=time.monotonic(),
        )

    def _tell_of_proxy(self, address: str) -> None:
        """Log, once per address, that all clients behind a proxy count as one."""
        if address in self._told or len(self._told) == _MOST_TOLD:
            return
        self._told.add(address)
        log.warning(
            "%s forwards requests of others, which all count as its own, with one fair share: if "
            "it is your proxy, name it in CLOZE_TRUSTED_PROXIES, and let it set X-Forwarded-For",
            address or "a client without an address",
        )

    def _forwarded(self, headers: Headers, address: str) -> str:
        """Return the last address of the last ``X-Forwarded-For`` that no trusted proxy has."""
        value = dict(headers).get(b"x-forwarded-for")
        for hop in reversed(value.decode("latin-1").split(",")) if value is not None else ():
            address = hop.strip()[:64]
            if not self._trusts(address):
                break
        return address

    def _is_trusted(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in self._trusted)


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
        raise InvalidRequest(
            f"x-request-timeout-ms: a whole number from 1 to {most_s * 1000:.0f}, "
            f"got {ascii(stated.decode('latin-1'))[:40]}"
        )
    return milliseconds / 1000


# ---- access --------------------------------------------------------------------------------------


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

    def check(self, request: RequestRecord) -> None:
        """Raise unless a request may go on, and count it for its key.

        Raises:
            ServiceError: the host, the key, its permission or its rate is wrong, or it has expired.
        """
        for name, value in request.headers if self.hosts else ():
            if name != b"host" or is_accepted(value, self.hosts):
                continue
            if not (request.path in self.by_address and is_address(value)):
                raise Forbidden(
                    f"the Host header {ascii(value.decode('latin-1'))[:80]} is not of this "
                    "server; name it in allowed_hosts"
                )
        key, path = request.key, request.path
        is_open = request.method in ("GET", "HEAD") and path in self.open_routes
        if is_open or not self.needs_keys:
            return
        fitting = (needed for begin, needed in self.permissions if path.startswith(begin))
        needed = next(fitting, Permission.INFERENCE)
        if key is None:
            raise Unauthorized("send a key of this server: Authorization: Bearer KEY")
        if key.expires_before(datetime.now(UTC)):
            raise Unauthorized(f"the key {key.name} has expired at {key.entry.expires}")
        if needed not in key.entry.scopes:
            raise Forbidden(f"the key {key.name} lacks the scope {needed}")
        key.count(time.monotonic())


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def accepted_hosts(host: str, allowed: Sequence[str]) -> frozenset[bytes]:
    """Return the names that the Host header may have, for an address to listen on; empty: any."""
    if not allowed and not is_loopback(host):
        return frozenset()
    own = f"[{host}]" if ":" in host else host
    return frozenset(name.lower().encode() for name in (*_LOOPBACK_NAMES, *(allowed or [own])))


@lru_cache(64)  # a client sends the same one with each request
def is_accepted(value: bytes, hosts: frozenset[bytes]) -> bool:
    """Return whether the value of a Host header names one of the hosts, with or without a port."""
    name = value.strip().lower()
    if name.startswith(b"["):
        return name.partition(b"]")[0] + b"]" in hosts
    return name.partition(b":")[0] in hosts


def is_address(value: bytes) -> bool:
    """Return whether the value of a Host header is an IP address, with or without a port."""
    name = value.strip().decode("latin-1")
    host = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
