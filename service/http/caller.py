"""What the headers of a request say about its caller: the client, its id, its time limit."""

import ipaddress
import random
import re
from collections.abc import Sequence
from functools import lru_cache

from starlette.types import Scope

from cloze.service.core import InvalidRequest
from cloze.service.http.keys import Key, Keys

TIMEOUT_HEADER = b"x-request-timeout-ms"

_READ_TIMEOUT_HEADER = b"x-stainless-read-timeout"
"""Seconds that the openai client waits for an answer; it sends the header with every request."""

_FORWARDED = b"x-forwarded-for"

_KEY = "cloze.key"
"""Key of a scope: the request's API key, once it is known."""

_SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
"""Request ids that the server accepts from a client and returns in a header."""


class Callers:
    """Names the clients of requests, for fair shares and limits.

    Args:
        trusted_proxies: addresses and networks whose ``X-Forwarded-For`` is believed.
        keys: the API keys; None: there are none.

    Attributes:
        keys: the API keys; None: there are none.

    Raises:
        ValueError: a string is neither an address nor a network.
    """

    def __init__(self, trusted_proxies: Sequence[str] = (), keys: Keys | None = None) -> None:
        self.keys = keys
        self._trusted = [ipaddress.ip_network(proxy, strict=False) for proxy in trusted_proxies]
        self._trusts = lru_cache(1024)(self._is_trusted)

    def key(self, scope: Scope) -> Key | None:
        """Return the API key of a request; None if it has none."""
        if _KEY not in scope:
            headers = scope["headers"]
            sent = next((value for name, value in headers if name == b"authorization"), b"")
            scope[_KEY] = self.keys.find(sent) if self.keys is not None and sent else None
        found: Key | None = scope[_KEY]
        return found

    def name(self, scope: Scope) -> str:
        """Return the key's name or the address of a client; "" if the server knows neither."""
        if self.keys is not None and (key := self.key(scope)) is not None:
            return f"key {key.name}"
        peer = scope.get("client")
        address: str = peer[0] if peer else ""
        if self._trusted and self._trusts(address):
            for name, value in reversed(scope["headers"]):
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


def timeout_s(scope: Scope, most_s: float) -> float | None:
    """Return the time limit that a request states, in seconds; None if it states none.

    `TIMEOUT_HEADER` is for this server. Without it, `_READ_TIMEOUT_HEADER` counts, up to the
    largest limit.

    Args:
        scope: the request.
        most_s: largest time limit.

    Raises:
        InvalidRequest: the header is no whole number of milliseconds, or above the largest limit.
    """
    read_timeout_s = None
    for name, value in scope["headers"]:
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


def is_first_try(scope: Scope) -> bool:
    """Return whether the client says that it sends a request for the first time.

    The openai client counts its retries in a header. Other clients say nothing.
    """
    return (b"x-stainless-retry-count", b"0") in scope["headers"]


def request_id(scope: Scope) -> bytes:
    """Return the client's request id if it matches `_REQUEST_ID`, else a random id."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value.decode("latin-1")):
            return bytes(value)
    return b"%016x" % random.getrandbits(64)
