"""The errors that the parts of the service raise.

Each `ServiceError` ends one request, and `http.errors` maps it to a status. A `RequestError` is
the client's: a retry of the same request fails again. `StartupError` ends the server.

The code of an error is stable, so clients may compare the code. A message may change.
"""

from enum import StrEnum
from typing import ClassVar, Final, Self


class ServiceError(Exception):
    """The reason why a request gets no result. The client receives the message.

    Attributes:
        code: the value of the header `x-error-code`.
    """

    code: ClassVar[str]

    def __init_subclass__(cls, code: str = "") -> None:
        """Set the code of a kind of error; by default it is that of the base class."""
        if code:
            cls.code = code


class Location(tuple[str | int, ...]):
    """A place in a request: names of fields, and numbers, like ``inputs[3].question``."""

    __slots__ = ()

    def __str__(self) -> str:
        shown = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in self)
        return "".join(shown).removeprefix(".")

    def below(self, *parts: str | int) -> "Location":
        """Return a place within this one."""
        return Location((*self, *parts))


def quoted(text: str) -> str:
    """Return the beginning of a client's text for a message: in quotes and ASCII."""
    return ascii(text[:80])[:80]


class RequestError(ServiceError):
    """The request is wrong; a retry of the same request fails again.

    Attributes:
        at: the place of the problem, with which the message begins; None: there is no single one.
        lead: words of the message before the place.
    """

    def __init__(self, problem: str, at: Location | None = None, lead: str = "") -> None:
        super().__init__(f"{lead}{at} {problem}" if at else problem)
        self.problem, self.at, self.lead = problem, at, lead

    def moved(self, at: Location | None) -> Self:
        """Return the error with another place."""
        return type(self)(self.problem, at, self.lead)


class MalformedRequest(RequestError, code="malformed_body"):
    """The body is not JSON."""


class SlowRequest(RequestError, code="body_timeout"):
    """The body did not arrive within the request timeout."""


class InvalidRequest(RequestError, code="invalid_value"):
    """A value of the request is malformed or out of its limits."""


class InvalidBody(InvalidRequest, code="invalid_body"):
    """The body lacks a field, has an unknown one, or one with a value of another type."""


class MissingField(InvalidBody, code="missing_field"):
    """The body of gliner's protocol lacks a field, which has a status of its own there."""


class TextTooLong(InvalidRequest, code="text_too_long"):
    """A text is longer than the limit, or than the model reads, and may not be cut."""


class TooMany(InvalidRequest, code="limit_exceeded"):
    """The request has more texts or tokens, or asks for more results, than the limit."""


class EmptyRequest(RequestError, code="empty_input"):
    """The request has no text, or one of its texts is empty."""


class RequestTooLarge(RequestError, code="body_too_large"):
    """The body has more bytes than the limit."""


class UnsupportedEncoding(RequestError, code="unsupported_encoding"):
    """The body has a content encoding that the server does not read."""


class Unauthorized(RequestError, code="unauthorized"):
    """The request has no valid API key."""


class KeyExpired(Unauthorized, code="key_expired"):
    """The API key of the request has expired."""


class Forbidden(RequestError, code="forbidden"):
    """The API key does not allow the request, or no key can."""


class OtherHost(Forbidden, code="host_not_allowed"):
    """The request is for another host."""


class UnknownModel(RequestError, code="model_not_found"):
    """The request names a model that is not served."""


class WrongTask(RequestError, code="task_not_supported"):
    """The model has no head for the task."""


class OtherEmbeddingSpace(RequestError, code="other_embedding_space"):
    """The vectors would not be in the space that the request expects."""


class ReloadRefused(RequestError, code="reload_refused"):
    """The server cannot serve what the store, the keys or the certificate now hold."""


class Rejection(StrEnum):
    """Why the state of the server keeps a request from its result."""

    WAIT = "wait"  # it would wait for too long
    DEADLINE = "deadline"  # it would end after its time limit
    QUEUE_FULL = "queue_full"  # the queue would hold too many tokens
    MEMORY = "memory"  # large bodies hold the memory
    KEY_LIMIT = "key_limit"  # its key has sent too many
    TIMEOUT = "timeout"  # it was not answered in its time
    STATED_LIMIT = "stated_limit"  # nor in a time limit of its own, below the server's
    SHUTTING_DOWN = "shutting_down"
    ENGINE_DEAD = "engine_dead"


class Overloaded(ServiceError, code="overloaded"):
    """The request would wait for too long, or the queue is full.

    Attributes:
        retry_after_s: seconds until the server is likely to admit the request.
        each_s: seconds in which the queue works off one such request.
    """

    def __init__(
        self,
        message: str,
        retry_after_s: float,
        reason: Rejection = Rejection.WAIT,
        each_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.retry_after_s, self.reason, self.each_s = retry_after_s, reason, each_s


class RateLimited(Overloaded, code="rate_limited"):
    """The API key has sent too many requests or tokens."""


class DeadlineExceeded(ServiceError, code="timeout"):
    """The request timed out."""


class ClientGone(ServiceError, code="client_closed"):
    """The client closed its connection before the answer was ready."""


class ShuttingDown(ServiceError, code="shutting_down"):
    """The server is draining and admits no new requests."""


class EngineFailed(ServiceError, code="engine_failed"):
    """The engine raised an exception on an encoding that ran alone."""


class AdapterUnavailable(ServiceError, code="adapter_unavailable"):
    """The files of an adapter are gone, or have changed since the last reload."""


class EngineDead(ServiceError, code="engine_dead"):
    """No engine runs: it hangs, fails its golden outputs, or its process has exited."""


CODES_OF_STATUSES: Final = {
    400: "malformed_http",
    404: "route_not_found",
    405: "method_not_allowed",
    431: "headers_too_large",
    500: "internal_error",
    503: "too_many_connections",
    505: "unsupported_http_version",
}
"""Codes of the errors of connections and of the router, and of a bug."""

BUSY: Final = "another reload is under way, or its old models still answer requests; ask again"
"""Why a reload that is asked for by a request is refused at once; a signal waits."""

NEEDS_ROLL: Final = (
    "nothing was reloaded: with front ends, a reload of models needs a roll of the replicas, or a "
    "restart; keys and certificates are read again when their files change"
)


class StartupError(Exception):
    """The server cannot start because of a setting, a bundle, a device or a port; one line."""
