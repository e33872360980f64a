"""Who sends a request, and whether it may be sent: client, key, time limit, id, Host header."""

import ipaddress
import random
import re
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from starlette.types import Scope

from cloze.service.core import Forbidden, InvalidRequest
from cloze.service.http.keys import Keys, Permission, check_key
from cloze.service.http.record import Headers, RequestRecord

OF_ADMIN_SOCKET: Final = "cloze.admin_socket"
"""Key of a request's state: whether the request came through the admin socket."""

TIMEOUT_HEADER: Final = b"x-request-timeout-ms"

_READ_TIMEOUT_HEADER: Final = b"x-stainless-read-timeout"
"""Seconds that the openai client waits for an answer; it sends the header with every request."""

_FORWARDED: Final = b"x-forwarded-for"

_SECONDS: Final = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
"""Request ids that the server accepts from a client and returns in a header."""

_LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")


class Callers:
    """Reads what the headers of requests say about their clients.

    Args:
        trusted_proxies: addresses and networks whose ``X-Forwarded-For`` is believed.
        keys: the API keys; None: there are none.
        max_timeout_s: largest time limit that a request may state, in seconds.

    Attributes:
        keys: the API keys; None: there are none.

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

    def record(self, scope: Scope, route: str | None) -> RequestRecord:
        """Return the record of a request whose headers have arrived.

        Args:
            scope: the ASGI scope of the request.
            route: the route of its path; None if there is none.
        """
        headers: Headers = scope["headers"]
        first = dict(reversed(headers))  # the first value of each header
        sent = first.get(b"content-length", b"")
        key, stated_s, limit_problem = None, None, ""
        if self.keys is not None and b"authorization" in first:
            key = self.keys.find(first[b"authorization"])
        try:
            stated_s = timeout_s(headers, self._max_timeout_s)
        except InvalidRequest as error:
            limit_problem = error.problem
        return RequestRecord(
            method=scope["method"],
            path=scope["path"],
            route=route,
            headers=headers,
            length=int(sent) if sent.isdigit() and len(sent) < 16 else None,
            identity=request_id(headers),
            key=key,
            client=f"key {key.name}" if key is not None else self._address(scope, headers),
            stated_s=stated_s,
            limit_problem=limit_problem,
            arrived=time.monotonic(),
        )

    def _address(self, scope: Scope, headers: Headers) -> str:
        """Return the address of a client; "" if the server does not know it."""
        peer = scope.get("client")
        address: str = peer[0] if peer else ""
        if self._trusted and self._trusts(address):
            for name, value in reversed(headers):
                if name == _FORWARDED:
                    return self._forwarded(value.decode("latin-1"), address)
        return address

    def _forwarded(self, value: str, address: str) -> str:
        """Return the last address that no trusted proxy has."""
        for hop in reversed(value.split(",")):
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


def timeout_s(headers: Headers, most_s: float) -> float | None:
    """Return the time limit that a request states, in seconds; None if it states none.

    `TIMEOUT_HEADER` is for this server. Without it, `_READ_TIMEOUT_HEADER` counts, up to the
    largest limit.

    Args:
        headers: the headers of the request.
        most_s: largest time limit.

    Raises:
        InvalidRequest: the header is no whole number of milliseconds, or above the largest limit.
    """
    read_timeout_s = None
    for name, value in headers:
        if name == _READ_TIMEOUT_HEADER:
            read_timeout_s = _read_timeout_s(value, most_s)
        elif name == TIMEOUT_HEADER:
            text = value.decode("latin-1")
            milliseconds = int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0
            if not 1 <= milliseconds <= most_s * 1000:
                raise InvalidRequest(
                    f"x-request-timeout-ms: a whole number from 1 to {most_s * 1000:.0f}, "
                    f"got {ascii(text)[:40]}"
                )
            return milliseconds / 1000
    return read_timeout_s


def _read_timeout_s(value: bytes, most_s: float) -> float | None:
    """Return the seconds of `_READ_TIMEOUT_HEADER`; None if they make no sense."""
    if _SECONDS.fullmatch(value) is None or (seconds := float(value)) < 0.001:
        return None
    return min(seconds, most_s)


def is_first_try(headers: Headers) -> bool:
    """Return whether the client says that it sends a request for the first time.

    The openai client counts its retries in a header. Other clients say nothing.
    """
    return (b"x-stainless-retry-count", b"0") in headers


def request_id(headers: Headers) -> bytes:
    """Return the client's request id if it matches `_REQUEST_ID`, else a random id."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return bytes(value)
    return b"%016x" % random.getrandbits(64)


# ---- access --------------------------------------------------------------------------------------


class Access:
    """Refuses requests without a key, and requests for another host.

    Args:
        needs_keys: whether the server has API keys; otherwise everybody may send requests.
        open_routes: paths whose GET needs no key: probes, and pages without data.
        permissions: (prefix of a path, what a key must allow); other paths need
            `Permission.INFERENCE`.
        hosts: names in the Host header that are accepted; empty: any. A page of another site cannot
            send requests to a server on loopback by a name of its own (DNS rebinding).
        by_address: paths that are also answered to a Host header with any IP address, in which no
            page has a name of its own: a kubelet and a Prometheus ask a pod by its address.
    """

    def __init__(
        self,
        *,
        needs_keys: bool,
        open_routes: frozenset[str],
        permissions: Sequence[tuple[str, Permission]],
        hosts: frozenset[bytes],
        by_address: frozenset[str] = frozenset(),
    ) -> None:
        self._needs_keys, self._open_routes = needs_keys, open_routes
        self._permissions, self._hosts = permissions, hosts
        self._by_address = by_address

    def check(self, request: RequestRecord) -> None:
        """Raise unless a request may go on, and count it for its key.

        Raises:
            ServiceError: the host, the key, its permission or its rate is wrong.
        """
        path = request.path
        for name, value in request.headers if self._hosts else ():
            if name != b"host" or is_accepted(value, self._hosts):
                continue
            if not (path in self._by_address and is_address(value)):
                raise Forbidden(
                    f"the Host header {ascii(value.decode('latin-1'))[:80]} is not of this "
                    "server; name it in allowed_hosts"
                )
        is_open = request.method in ("GET", "HEAD") and path in self._open_routes
        if is_open or not self._needs_keys:
            return
        needed = next(
            (needed for prefix, needed in self._permissions if path.startswith(prefix)),
            Permission.INFERENCE,
        )
        check_key(request.key, needed)


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def accepted_hosts(host: str, allowed: Sequence[str]) -> frozenset[bytes]:
    """Return the names that the Host header may have; empty: any.

    Args:
        host: the address to listen on.
        allowed: further names.
    """
    if allowed:
        names = (*allowed, *_LOOPBACK_NAMES)
    elif is_loopback(host):
        names = (*_LOOPBACK_NAMES, f"[{host}]" if ":" in host else host)
    else:
        return frozenset()
    return frozenset(name.lower().encode() for name in names)


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
