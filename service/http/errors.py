"""The table that maps errors to HTTP statuses, and the values of an error response."""

import math
from dataclasses import dataclass, field
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cloze.service import core

STATUS: dict[type[Exception], tuple[int, str]] = {
    core.MalformedRequest: (400, "Validation"),
    core.EmptyRequest: (400, "Empty"),
    core.Unauthorized: (401, "Validation"),
    core.Forbidden: (403, "Validation"),
    core.UnknownModel: (404, "Validation"),
    core.SlowRequest: (408, "Validation"),
    core.ReloadRefused: (409, "Backend"),
    core.OtherEmbeddingSpace: (412, "Validation"),
    core.RequestTooLarge: (413, "Validation"),
    core.UnsupportedEncoding: (415, "Validation"),
    core.InvalidRequest: (422, "Validation"),
    core.WrongTask: (424, "Backend"),
    core.Overloaded: (429, "Overloaded"),
    core.ClientGone: (499, "Validation"),
    core.EngineFailed: (500, "Backend"),
    core.AdapterUnavailable: (503, "Unhealthy"),
    core.ShuttingDown: (503, "Unhealthy"),
    core.EngineDead: (503, "Unhealthy"),
    core.DeadlineExceeded: (504, "Overloaded"),
}
"""The HTTP status and text-embeddings-inference's ``error_type`` of every `ServiceError`."""

ERROR_STATUSES: Final = tuple(sorted({status for status, _ in STATUS.values()}))

STATUSES_FROM_ZERO: Final = (200, *(s for s in ERROR_STATUSES if s == 429 or s >= 500))
"""Results and the server's own errors, whose metric series start from zero.

Each series has a line per bucket in every scrape, so the series of the clients' errors begin with
the first such error.
"""


def without_422(status: int) -> int:
    """Return the status of a protocol that has no status 422."""
    return 400 if status == 422 else status


_REJECTIONS: dict[type[Exception], core.Rejection] = {
    core.DeadlineExceeded: core.Rejection.TIMEOUT,
    core.ShuttingDown: core.Rejection.SHUTTING_DOWN,
    core.EngineDead: core.Rejection.ENGINE_DEAD,
}

_HEADERS: Final = {
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},  # else the rest of the body would be the next request
    415: {"accept-encoding": "gzip"},  # RFC 9110, section 12.5.3
    503: {"retry-after": "1"},  # another replica can answer, and an engine restarts
}


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """The values of an error response, independent of the protocol; see `STATUS` for the kind."""

    status: int
    kind: str
    message: str
    error: Exception
    headers: dict[str, str] = field(default_factory=dict)


def describe_error(request: Request, error: Exception) -> ErrorInfo:
    """Return the response values of an error of the service, of the router, or of a bug.

    The message for a bug does not contain the exception.
    """
    if isinstance(error, core.ServiceError):
        status, kind = STATUS[type(error)]
        headers = dict(_HEADERS.get(status, {}))
        if isinstance(error, core.Overloaded):
            for name, per_s in (("retry-after", 1), ("retry-after-ms", 1000)):
                headers[name] = str(max(1, math.ceil(error.retry_after_s * per_s)))
        return ErrorInfo(status, kind, str(error), error, headers)
    if isinstance(error, HTTPException):
        messages = {
            404: f"there is no route {ascii(request.url.path)[:120]}; see /docs",
            405: f"{request.url.path} does not answer {request.method}",
        }
        message = messages.get(error.status_code, str(error.detail))
        headers = dict(error.headers or {})
        return ErrorInfo(error.status_code, "Validation", message, error, headers)
    return ErrorInfo(500, "Backend", "an internal error; it was logged", error)


def rejection(error: Exception) -> core.Rejection | None:
    """Return why the server's own state lets a request fail; None if it is not its state."""
    return error.reason if isinstance(error, core.Overloaded) else _REJECTIONS.get(type(error))
