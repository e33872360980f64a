"""Requests whose headers have arrived, without a server."""

from collections.abc import Callable
from typing import Any

from cloze.service.core import ServedRequest
from cloze.service.http.record import Callers
from cloze.service.http.routes import RECORD


def pairs(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as ASGI has them; ``_`` in a name stands for a hyphen."""
    return [(n.replace("_", "-").encode(), v.encode("latin-1")) for n, v in headers.items()]


def recorded(
    path: str = "/embed",
    *,
    method: str = "POST",
    client: str | None = "a",
    route: str | None = None,
    callers: Callers | None = None,
    **headers: str,
) -> ServedRequest:
    """Return a request."""
    scope = {
        "method": method,
        "path": path,
        "client": (client, 1) if client else None,
        "headers": pairs(headers),
    }
    return (callers or Callers()).record(scope, path if route is None else route)


class Open:
    """An open connection, whose client leaves when a test says so."""

    def __init__(self, address: str = "") -> None:
        self.address, self.is_lost = address, False
        self.on_lost: Callable[[], None] | None = None

    def leave(self) -> None:
        """Lose the client."""
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()

    def end(self, reason: str) -> None:
        raise NotImplementedError


def connected(client: str) -> ServedRequest:
    """Return a request whose connection is open."""
    record = recorded(client=client)
    record.connection = Open()
    return record


def scope_of(record: ServedRequest) -> dict[str, Any]:
    """Return the ASGI scope of a request."""
    return {
        "type": "http",
        "method": record.method,
        "path": record.path,
        "headers": record.headers,
        RECORD: record,
    }
