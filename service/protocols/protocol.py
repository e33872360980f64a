"""What a protocol is: the contract that every module of this package fulfils with its `PROTOCOL`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from service.http.errors import ErrorInfo
from service.http.routes import Route
from service.metrics import Metrics
from service.pipeline import Models
from service.tasks import Task


class ServerState(Protocol):
    """What probes ask of the server."""

    @property
    def dead(self) -> str | None:
        """Why an engine is dead; None while all run."""
        ...

    @property
    def draining(self) -> bool:
        """Whether the server refuses new requests."""
        ...

    @property
    def restarts_engines(self) -> bool:
        """Whether a supervisor restarts a dead engine; the process then stays alive."""
        ...


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """What the HTTP interface itself refuses; tasks have limits of their own.

    Attributes:
        max_request_bytes: per body.
        max_request_texts: per request.
        request_timeout_s: from a request's first byte to its answer.
    """

    max_request_bytes: int
    max_request_texts: int
    request_timeout_s: float


@dataclass(frozen=True, slots=True)
class ProtocolContext:
    """What routes need to answer."""

    tasks: Mapping[str, Task]
    models: Models
    metrics: Metrics
    state: ServerState
    limits: ApiLimits


@dataclass(frozen=True, slots=True)
class WireProtocol:
    """How clients speak to the server.

    Attributes:
        name: of the protocol.
        prefix: how its paths begin; an unknown path's error has the shape of the longest prefix.
        routes: context -> the routes.
        error: an error -> its status and its JSON body.
    """

    name: str
    prefix: str
    routes: Callable[[ProtocolContext], Sequence[Route]]
    error: Callable[[ErrorInfo], tuple[int, Mapping[str, Any]]]
