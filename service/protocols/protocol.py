"""The definition of a protocol. Each protocol module of the package defines one as `PROTOCOL`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from cloze.service.core import Changes, EngineDead, ShuttingDown
from cloze.service.http.errors import ErrorInfo
from cloze.service.http.json_bodies import BodyLimits
from cloze.service.http.routes import Route
from cloze.service.http.watch import RequestWatch
from cloze.service.metrics import Metrics
from cloze.service.pipeline import Models
from cloze.service.settings import Settings
from cloze.service.tasks import Task


class ServerState(Protocol):
    """The state of the server that probes report."""

    @property
    def dead(self) -> str | None:
        """Why an engine is dead; None while all engines run."""
        ...

    @property
    def draining(self) -> bool:
        """Whether the server refuses new requests."""
        ...

    async def reload(self) -> Changes:
        """Serve what the store, the keys and the certificate hold now.

        Raises:
            ReloadRefused: that cannot be served; what was served before is served on.
        """
        ...

    @property
    def restarts_engines(self) -> bool:
        """Whether a supervisor restarts a dead engine, so that this process stays alive."""
        ...


def check_alive(state: ServerState) -> None:
    """Raise if the process should be restarted.

    Raises:
        EngineDead: an engine is dead, and no supervisor restarts it.
    """
    if not state.restarts_engines:
        _check_engine(state)


def check_ready(state: ServerState) -> None:
    """Raise unless the process admits requests.

    Raises:
        EngineDead: an engine is dead.
        ShuttingDown: the server is draining.
    """
    _check_engine(state)
    if state.draining:
        raise ShuttingDown("the server is shutting down")


def _check_engine(state: ServerState) -> None:
    if (reason := state.dead) is not None:
        raise EngineDead(f"the engine is dead: {reason}")


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """The limits of the HTTP interface; `TaskLimits` has the limits of tasks.

    Attributes:
        body: the limits of a body.
        max_request_texts: most texts per request.
    """

    body: BodyLimits
    max_request_texts: int

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Return the limits that the settings give."""
        texts = settings.max_request_texts
        body = BodyLimits.of_requests(
            settings.max_request_bytes, texts, settings.max_request_tokens
        )
        return cls(body, texts)


@dataclass(frozen=True, slots=True)
class ProtocolContext:
    """The parts of the service that routes use.

    Attributes:
        tasks: the tasks by name.
        models: the served models.
        metrics: the metrics that routes record and return.
        state: the state of the server.
        limits: the limits of the HTTP interface.
        watch: ends requests that take too long.
    """

    tasks: Mapping[str, Task]
    models: Models
    metrics: Metrics
    state: ServerState
    limits: ApiLimits
    watch: RequestWatch


@dataclass(frozen=True, slots=True)
class WireProtocol:
    """A wire protocol: its routes and the shape of its errors.

    Attributes:
        name: name of the protocol.
        prefixes: prefixes of the protocol's paths. The protocol with the longest prefix of a path
            writes the errors of the path, also if the path is unknown.
        routes: context -> the routes.
        error: error -> the HTTP status and the JSON body.
    """

    name: str
    prefixes: tuple[str, ...]
    routes: Callable[[ProtocolContext], Sequence[Route]]
    error: Callable[[ErrorInfo], tuple[int, Mapping[str, Any]]]
