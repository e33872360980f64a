"""The table that maps errors to HTTP statuses, and the values of an error response."""

import math
from dataclasses import dataclass, field
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request

from cloze.service import errors

STATUS: dict[type[Exception], tuple[int, str]] = {
    errors.MalformedRequest: (400, "Validation"),
    errors.EmptyRequest: (400, "Empty"),
    errors.Unauthorized: (401, "Validation"),
    errors.Forbidden: (403, "Validation"),
    errors.MissingField: (404, "Validation"),
    errors.UnknownModel: (404, "Validation"),
    errors.SlowRequest: (408, "Validation"),
    errors.ReloadRefused: (409, "Backend"),
    errors.OtherEmbeddingSpace: (412, "Validation"),
    errors.RequestTooLarge: (413, "Validation"),
    errors.UnsupportedEncoding: (415, "Validation"),
    errors.InvalidRequest: (422, "Validation"),
    errors.WrongTask: (424, "Backend"),
    errors.Overloaded: (429, "Overloaded"),
    errors.ClientGone: (499, "Validation"),
    errors.EngineFailed: (500, "Backend"),
    errors.AdapterUnavailable: (503, "Unhealthy"),
    errors.ShuttingDown: (503, "Unhealthy"),
    errors.EngineDead: (503, "Unhealthy"),
    errors.DeadlineExceeded: (504, "Overloaded"),
}
"""HTTP status and text-embeddings-inference's ``error_type`` of a `ServiceError` and its kinds."""

ERROR_STATUSES: Final = tuple(sorted({status for status, _ in STATUS.values()}))

STATUSES_FROM_ZERO: Final = (200, *(s for s in ERROR_STATUSES if s == 429 or s >= 500))
"""Results and the server's own errors, whose metric series start from zero.

Each series has a line per bucket in every scrape, so the series of the clients' errors begin with
the first such error.
"""


_REJECTIONS: dict[type[Exception], errors.Rejection] = {
    errors.DeadlineExceeded: errors.Rejection.TIMEOUT,
    errors.ShuttingDown: errors.Rejection.SHUTTING_DOWN,
    errors.EngineDead: errors.Rejection.ENGINE_DEAD,
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
    code: str
    message: str
    headers: dict[str, str] = field(default_factory=dict)


def describe_error(request: Request, error: Exception) -> ErrorInfo:
    """Return the response values of an error of the service, of the router, or of a bug.

    The message for a bug does not contain the exception.
    """
    if isinstance(error, errors.ServiceError):
        status, kind = next(filter(None, map(STATUS.get, type(error).__mro__)))
        headers = dict(_HEADERS.get(status, {}))
        if isinstance(error, errors.Overloaded):
            for name, per_s in (("retry-after", 1), ("retry-after-ms", 1000)):
                headers[name] = str(max(1, math.ceil(error.retry_after_s * per_s)))
        return ErrorInfo(status, kind, error.code, str(error), headers)
    if isinstance(error, HTTPException):
        messages = {
            404: f"there is no route {ascii(request.url.path)[:120]}; see /docs",
            405: f"{request.url.path[:120]} does not answer {request.method}",
        }
        message = messages.get(error.status_code, str(error.detail))
        code = errors.CODES_OF_STATUSES.get(error.status_code, "route_not_found")
        headers = dict(error.headers or {})
        return ErrorInfo(error.status_code, "Validation", code, message, headers)
    message = "an internal error; it was logged"
    return ErrorInfo(500, "Backend", errors.CODES_OF_STATUSES[500], message)


def rejection(error: Exception) -> errors.Rejection | None:
    """Return why the server's own state lets a request fail; None if it is not its state."""
    return error.reason if isinstance(error, errors.Overloaded) else _REJECTIONS.get(type(error))
