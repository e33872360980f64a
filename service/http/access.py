"""Who may send a request: checks of keys, of the Host header, and headers for browsers."""

import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from cloze.service.core import Forbidden, ServiceError
from cloze.service.http.caller import Callers
from cloze.service.http.keys import Scope, check_scope

OF_ADMIN_SOCKET: Final = "cloze.admin_socket"
"""Key of a request's state: whether the request came through the admin socket."""

_LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AccessControl:
    """ASGI middleware that refuses requests without a key, or for another host.

    Args:
        app: the wrapped application.
        callers: finds the keys of requests; without keys, everybody may send requests.
        open_routes: paths whose GET needs no key: probes, and pages without data.
        scopes: (prefix of a decoded path, scope); other paths need `Scope.INFERENCE`.
        hosts: names in the Host header that are accepted; empty: any. A page of another site cannot
            send requests to a server on loopback by a name of its own (DNS rebinding).
        respond: returns the response to an error.
    """

    def __init__(
        self,
        app: ASGIApp,
        callers: Callers,
        open_routes: frozenset[str],
        scopes: Sequence[tuple[str, Scope]],
        hosts: frozenset[bytes],
        respond: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app, self._respond = app, respond
        self._callers, self._open_routes, self._scopes = callers, open_routes, scopes
        self._hosts = hosts

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ServiceError as error:
                response = await self._respond(Request(scope), error)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: AsgiScope) -> None:
        """Raise unless the request may go on.

        Raises:
            ServiceError: the host, the key, its scope or its rate is wrong.
        """
        for name, value in scope["headers"]:
            if name == b"host" and self._hosts and not is_accepted(value, self._hosts):
                raise Forbidden(
                    f"the Host header {ascii(value.decode('latin-1'))[:80]} is not of this "
                    "server; name it in allowed_hosts"
                )
        path = scope["path"]
        if self._callers.keys is None:
            return
        if scope["method"] in ("GET", "HEAD") and path in self._open_routes:
            return
        needed = next(
            (needed for prefix, needed in self._scopes if path.startswith(prefix)),
            Scope.INFERENCE,
        )
        check_scope(self._callers.key(scope), needed)


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
