"""One module per wire protocol: the routes of the protocol and the shape of its errors.

To add a protocol, write a module with a `PROTOCOL` and add the `PROTOCOL` to `PROTOCOLS`.
"""

from collections.abc import Iterable
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.core import ServedRequest
from cloze.service.errors import Rejection
from cloze.service.http.errors import describe_error, rejection
from cloze.service.http.routes import JSON, RECORD
from cloze.service.protocols import cohere, native, open_inference, openai, tei
from cloze.service.protocols.protocol import ProtocolContext, WireProtocol

PROTOCOLS: Final[tuple[WireProtocol, ...]] = (
    native.PROTOCOL,
    tei.PROTOCOL,
    openai.PROTOCOL,
    open_inference.PROTOCOL,
    cohere.PROTOCOL,
)


class ErrorResponder:
    """Writes every error in the shape of the protocol of the request's path.

    Args:
        protocols: the protocols; one protocol has the prefix ``/`` and is the default.
        timeout_s: the time limit of requests that state none.
    """

    def __init__(self, protocols: Iterable[WireProtocol], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        by_prefix = {prefix: p for p in protocols for prefix in p.prefixes}
        self._by_prefix = sorted(by_prefix.items(), key=lambda item: -len(item[0]))

    async def respond(self, request: Request, error: Exception) -> Response:
        """Return the response to an error."""
        info = describe_error(request, error)
        record: ServedRequest = request.scope[RECORD]
        record.error, reason = type(error).__name__, rejection(error)
        if reason is Rejection.TIMEOUT and record.limit_s < self._timeout_s:
            reason = Rejection.STATED_LIMIT
        record.rejection = reason
        protocol = next(
            protocol
            for prefix, protocol in self._by_prefix
            if record.path.startswith(prefix) or prefix == "/"
        )
        status = 400 if info.status == 422 and not protocol.has_422 else info.status
        return Response(orjson.dumps(protocol.error_body(info)), status, info.headers, JSON)


__all__ = ["PROTOCOLS", "ErrorResponder", "ProtocolContext", "WireProtocol"]
