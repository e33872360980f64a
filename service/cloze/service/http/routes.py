"""The routes of the HTTP interface, and how OpenAPI documents them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.batching.fair_queue import Queue

JSON = "application/json"
RAW = "application/octet-stream"
NPY = "application/x-npy"
TEXT = "text/plain"
HTML = "text/html"

Handler = Callable[[Request], Awaitable[Response]]

Respond = Callable[[Request, Exception], Awaitable[Response]]
"""(request, error) -> the response to the error."""

RECORD: Final = "cloze.record"
"""Key of an ASGI scope: its `ServedRequest`."""

ROOT_PATH: Final = "cloze.root_path"
"""Key of an ASGI scope: the setting `root_path`, if the server has one."""

CONNECTION: Final = "connection"
"""Key of the state of an ASGI scope: the `Connection` of the request."""


class Connection(Protocol):
    """The connection by which a request came.

    Attributes:
        address: the address of its client; "" if it is unknown.
        is_lost: whether its client has closed it.
        on_lost: called when that happens; None: nobody asks.
    """

    address: str
    is_lost: bool
    on_lost: Callable[[], None] | None

    def end(self, reason: str) -> None:
        """Close the connection, even if its client does not read."""


class GateModel(NamedTuple):
    """A served model of a route, by its full name.

    Models with the same `folder` wait in one queue: a base and its adapters.
    """

    reference: str
    queue: Queue
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """The documentation of a route in OpenAPI."""

    summary: str
    tag: str  # the group of the route in the documentation
    result: Any  # the type of the response's JSON; None if the response has no JSON
    error_body: Any = None  # the type of an error's JSON; None: that of the protocol of the path
    # The model of the request's body; None if the request has no body.
    body: type[BaseModel] | None = None
    # Request bodies by title.
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    media_types: tuple[str, ...] = ()  # media types of the response besides JSON
    # Headers of the response: name -> (type, description).
    headers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # Error statuses that the route may return; None: all of the protocol of the path.
    errors: tuple[int, ...] | None = None
    status: int = 200  # the status of a success


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the HTTP interface with its handler.

    Attributes:
        models: the served models that may answer, the default first. Their gate refuses requests
            of the route while the server is full. None: the route is for operators.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    doc: RouteDoc
    models: Sequence[GateModel] | None = None
