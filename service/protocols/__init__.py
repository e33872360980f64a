"""One module per wire protocol: the routes of the protocol and the shape of its errors.

To add a protocol, write a module with a `PROTOCOL` and add the `PROTOCOL` to `PROTOCOLS`.
"""

from collections.abc import Iterable
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.http.errors import describe_error
from cloze.service.http.routes import JSON
from cloze.service.protocols import native, openai, tei
from cloze.service.protocols.protocol import ApiLimits, ProtocolContext, WireProtocol

PROTOCOLS: Final[tuple[WireProtocol, ...]] = (native.PROTOCOL, tei.PROTOCOL, openai.PROTOCOL)


class ErrorResponder:
    """Writes every error in the shape of the protocol of the request's path.

    Args:
        protocols: the protocols; one protocol has the prefix ``/`` and is the default.
    """

    def __init__(self, protocols: Iterable[WireProtocol]) -> None:
        by_prefix = {prefix: p for p in protocols for prefix in p.prefixes}
        self._by_prefix = sorted(by_prefix.items(), key=lambda item: -len(item[0]))

    async def respond(self, request: Request, error: Exception) -> Response:
        """Return the response to an error."""
        path = request.scope["path"]
        info = describe_error(request, error)
        request.scope["cloze.error"] = type(error).__name__
        protocol = next(
            protocol
            for prefix, protocol in self._by_prefix
            if path.startswith(prefix) or prefix == "/"
        )
        status, body = protocol.error(info)
        return Response(orjson.dumps(body), status, info.headers, JSON)


__all__ = ["PROTOCOLS", "ApiLimits", "ErrorResponder", "ProtocolContext", "WireProtocol"]
