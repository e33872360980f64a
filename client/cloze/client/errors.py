"""The errors of the client, and how an HTTP response becomes one."""

import httpx


class ClientError(Exception):
    """A request got no result.

    Attributes:
        status: HTTP status; None without a response.
        request_id: the server's id of the request; None without a response.
        code: the stable code of the error, such as ``text_too_long``; None if the response has
            none, because a proxy wrote it.
    """

    def __init__(
        self,
        message: str,
        status: int | None = None,
        request_id: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.request_id = request_id
        self.code = code


class RequestRefused(ClientError):
    """The request is wrong: the same request will be refused again (status 4xx)."""


class ServerBusy(ClientError):
    """The server is full or shutting down, also after all retries (status 429 or 503).

    Attributes:
        retry_after_s: the server's estimate of when it admits requests; None without one.
    """

    retry_after_s: float | None = None


class ServerFailed(ClientError):
    """The server failed, or did not answer within its own time limit (status 5xx)."""


class ServerUnreachable(ClientError):
    """The server did not respond: no connection, or no answer within the client's timeout."""


def error_of(response: httpx.Response) -> ClientError:
    """Return the error of a response that is not a success."""
    status, headers = response.status_code, response.headers
    given = status, headers.get("x-request-id"), headers.get("x-error-code")
    message = f"{status}: {_message(response)}"
    if status in (429, 503):
        busy = ServerBusy(message, *given)
        busy.retry_after_s = retry_after_s(response)
        return busy
    kind = ServerFailed if status >= 500 else RequestRefused
    return kind(message, *given)


def retry_after_s(response: httpx.Response) -> float | None:
    """Return the seconds of the ``Retry-After`` header; None without a number there."""
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200] or response.reason_phrase
