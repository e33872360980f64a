"""One module per wire protocol: the routes of the protocol and the shape of its errors.

To add a protocol, write a module with a `PROTOCOL` and add the module to `PROTOCOLS`.
"""

from dataclasses import replace
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.core import ServedRequest
from cloze.service.errors import Rejection
from cloze.service.http.errors import ERROR_STATUSES, describe_error, rejection
from cloze.service.http.routes import JSON, RECORD, Route
from cloze.service.protocols import (
    cohere,
    gliner,
    native,
    ollama,
    open_inference,
    openai,
    pooling,
    reranking,
    sagemaker,
    shared_paths,
    tei,
    vertex,
    vllm,
    weaviate,
)
from cloze.service.protocols.protocol import ProtocolContext, WireProtocol

PROTOCOLS: Final[tuple[WireProtocol, ...]] = tuple(
    module.PROTOCOL
    for module in (
        *(native, tei, openai, open_inference, cohere, reranking, vllm),
        *(pooling, ollama, sagemaker, weaviate, vertex, gliner, shared_paths),
    )
)

_SHAPES: Final = sorted(
    ((prefix, one.suffix, one) for one in PROTOCOLS for prefix in one.prefixes),
    key=lambda row: (not row[1], -len(row[0])),
)
"""The protocols of errors by the ends of paths; the first that fits counts."""


def routes_of(context: ProtocolContext) -> list[Route]:
    """Return the routes of all protocols, each documented with the errors of its path."""
    routes = []
    for route in (route for protocol in PROTOCOLS for route in protocol.routes(context)):
        protocol, statuses = _protocol_of(route.path), route.doc.errors
        if statuses is None:
            statuses = tuple(s for s in ERROR_STATUSES if s != 422 or protocol.has_422)
        doc = replace(route.doc, error_body=protocol.error, errors=statuses)
        routes.append(replace(route, doc=doc))
    return routes


def _protocol_of(path: str) -> WireProtocol:
    """Return the protocol that writes the errors of a path."""
    starts, ends = path.startswith, path.endswith
    return next(one for prefix, suffix, one in _SHAPES if starts(prefix) and ends(suffix))


async def error_response(request: Request, error: Exception, timeout_s: float) -> Response:
    """Return the response to an error in the shape of the protocol of the request's path.

    The time limit is that of requests that state none.
    """
    info = describe_error(request, error)
    record: ServedRequest = request.scope[RECORD]
    record.error, record.rejection = info.code, rejection(error)
    if record.rejection is Rejection.TIMEOUT and record.limit_s < timeout_s:
        record.rejection = Rejection.STATED_LIMIT
    protocol = _protocol_of(record.path)
    status = 400 if info.status == 422 and not protocol.has_422 else info.status
    assert protocol.error is not None  # a protocol of paths has one
    body = protocol.error_body(info) if protocol.error_body else protocol.error(info.message)
    headers = {"x-error-code": info.code, **info.headers}
    return Response(orjson.dumps(body), status, headers, JSON)


__all__ = ["PROTOCOLS", "ProtocolContext", "WireProtocol", "error_response", "routes_of"]
