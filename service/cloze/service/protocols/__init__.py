"""One module per wire protocol: the routes of the protocol and the shape of its errors.

To add a protocol, write a module with a `PROTOCOL` and add the `PROTOCOL` to `PROTOCOLS`.
"""

from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.core import ServedRequest
from cloze.service.errors import Rejection
from cloze.service.http.errors import describe_error, rejection
from cloze.service.http.routes import JSON, RECORD
from cloze.service.protocols import (
    cohere,
    gliner,
    native,
    nvidia,
    ollama,
    ollama_models,
    open_inference,
    openai,
    openai_models,
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

PROTOCOLS: Final[tuple[WireProtocol, ...]] = (
    native.PROTOCOL,
    tei.PROTOCOL,
    openai.PROTOCOL,
    openai_models.PROTOCOL,
    open_inference.PROTOCOL,
    cohere.PROTOCOL,
    reranking.PROTOCOL,
    nvidia.PROTOCOL,
    vllm.PROTOCOL,
    pooling.PROTOCOL,
    ollama.PROTOCOL,
    ollama_models.PROTOCOL,
    sagemaker.PROTOCOL,
    weaviate.PROTOCOL,
    vertex.PROTOCOL,
    gliner.PROTOCOL,
    shared_paths.PROTOCOL,
)


_BY_PREFIX: Final = sorted(
    ((prefix, protocol) for protocol in PROTOCOLS for prefix in protocol.prefixes),
    key=lambda pair: -len(pair[0]),
)
"""Protocols by the prefixes of their paths; the default has ``/``, the last."""

_BY_SUFFIX: Final = [(protocol.suffix, protocol) for protocol in PROTOCOLS if protocol.suffix]


async def error_response(request: Request, error: Exception, timeout_s: float) -> Response:
    """Return the response to an error in the shape of the protocol of the request's path.

    The time limit is that of requests that state none.
    """
    info = describe_error(request, error)
    record: ServedRequest = request.scope[RECORD]
    record.error, record.rejection = info.code, rejection(error)
    if record.rejection is Rejection.TIMEOUT and record.limit_s < timeout_s:
        record.rejection = Rejection.STATED_LIMIT
    starts, ends = record.path.startswith, record.path.endswith
    by_prefix = (one for prefix, one in _BY_PREFIX if starts(prefix) or prefix == "/")
    protocol = next((one for suffix, one in _BY_SUFFIX if ends(suffix)), None) or next(by_prefix)
    status = 400 if info.status == 422 and not protocol.has_422 else info.status
    headers = {"x-error-code": info.code, **info.headers}
    return Response(orjson.dumps(protocol.error_body(info)), status, headers, JSON)


__all__ = ["PROTOCOLS", "ProtocolContext", "WireProtocol", "error_response"]
