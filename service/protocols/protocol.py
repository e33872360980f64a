"""The definition of a protocol. Each protocol module of the package defines one as `PROTOCOL`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import orjson
from pydantic import ConfigDict

from cloze.service.core import Changes, ServiceError
from cloze.service.http.errors import ErrorInfo
from cloze.service.http.json_bodies import BodyLimits
from cloze.service.http.routes import BytesResponse, Route
from cloze.service.http.watch import RequestWatch
from cloze.service.metrics import Metrics
from cloze.service.pipeline import Models
from cloze.service.settings import Settings
from cloze.service.tasks import Task
from cloze.service.tasks.task import WireModel


class ServerState(Protocol):
    """The state of the server that probes report."""

    def broken(self) -> ServiceError | None:
        """Return why the process should be restarted; None if it should not."""
        ...

    def unready(self) -> ServiceError | None:
        """Return why the process admits no request; None if it admits requests."""
        ...

    async def reload(self) -> Changes:
        """Serve what the store, the keys and the certificate hold now.

        Raises:
            ReloadRefused: that cannot be served; what was served before is served on.
        """
        ...


def json_response(value: Any) -> BytesResponse:
    """Return a value as JSON; it may have dataclasses and arrays."""
    return BytesResponse(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


def check(state: ServiceError | None) -> None:
    """Raise the reason of a state that is not good."""
    if state is not None:
        raise state


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
        has_keys: whether requests need API keys.
    """

    tasks: Mapping[str, Task]
    models: Models
    metrics: Metrics
    state: ServerState
    limits: ApiLimits
    watch: RequestWatch
    has_keys: bool


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


# ---- what the native protocol shares with text-embeddings-inference ------------------------------


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """An error in the shape of text-embeddings-inference, which the native protocol shares."""

    error: str
    error_type: str


def write_error(error: ErrorInfo) -> tuple[int, Mapping[str, Any]]:
    """Return the status and the body of an error."""
    return error.status, {"error": error.message, "error_type": error.kind}


_LONGEST_NAME, _MOST_NAMES = 40, 8


class LenientModel(WireModel):
    """A part of a request body that may have unknown fields, as text-embeddings-inference allows.

    Known fields are validated.
    """

    model_config = ConfigDict(extra="allow")


def ignored_fields(body: Any) -> Sequence[str]:
    """Return a warning with the names of a body's unknown fields; none if all are known.

    Args:
        body: a `LenientModel`, whose ``parameters`` may be one too.
    """
    names = list(body.model_extra)
    if parameters := vars(body).get("parameters"):  # getattr of a missing field takes microseconds
        names += [f"parameters.{name}" for name in parameters.model_extra]
    if not names:
        return ()
    shown = ", ".join(ascii(name[:_LONGEST_NAME])[1:-1] for name in names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (f"ignored unknown fields: {shown}{more}",)
