"""Reads and parses request bodies."""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from cloze.service.core import ClientGone, InvalidRequest, MalformedRequest, RequestTooLarge
from cloze.service.http.watch import WatchedRequest

B = TypeVar("B", bound=BaseModel)

_DISCARD_FACTOR = 8
"""Multiple of the size limit up to which an oversized body is read and discarded.

Many clients read the error response only after they have sent the whole body.
"""

_INLINE_BYTES = 65_536
"""Largest body that is parsed on the event loop; a thread parses larger bodies."""


async def receive(
    request: Request, model: type[B], limit: int, watched: WatchedRequest
) -> tuple[B, int]:
    """Read and parse the body of a request.

    Args:
        request: the request.
        model: the type of the body.
        limit: most bytes of the body.
        watched: ends the request if the body does not arrive in time.

    Returns:
        The parsed body and its size in bytes.

    Raises:
        RequestError: see `read_body` and `parse`.
    """
    data = await read_body(request, limit, watched)
    return await parse_anywhere(model, data), len(data)


async def parse_anywhere(model: type[B], data: bytes) -> B:
    """Parse a JSON body, a large one on a thread; see `parse`."""
    if len(data) <= _INLINE_BYTES:
        return parse(model, data)
    return await asyncio.to_thread(parse, model, data)


def parse(model: type[B], data: bytes) -> B:
    """Parse a JSON body.

    Raises:
        MalformedRequest: the body is not JSON.
        InvalidRequest: the JSON does not have the shape of the model.
    """
    if not data.strip():
        raise MalformedRequest("the body is empty; send a JSON object")
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        if problems[0]["type"] == "json_invalid":
            reason = problems[0]["ctx"]["error"]
            surrogate = "; \\ud800 to \\udfff, surrogates, must come in pairs"
            hint = surrogate if "hex escape" in reason else ""
            raise MalformedRequest(f"the body is not JSON: {reason}{hint}") from None
        raise InvalidRequest(_describe(problems)) from None


def _describe(problems: Sequence[Any]) -> str:
    """Return the message for validation errors, without the values that the client sent.

    If a field accepts several types, the message lists up to four errors of the first field.
    """
    first = problems[0]["loc"][0] if problems[0]["loc"] else "the body"
    lines = dict.fromkeys(
        f"{_location(problem['loc'])}: {problem['msg']}"
        for problem in problems
        if not problem["loc"] or problem["loc"][0] == first
    )
    return "; ".join(list(lines)[:4])


def _location(parts: Sequence[object]) -> str:
    return ".".join(str(part) for part in parts if not _is_union_member(part)) or "the body"


def _is_union_member(part: object) -> bool:
    """Return whether a part of a location is pydantic's name for a member of a union.

    The names of fields are lower-case; the names of models begin with a capital.
    """
    return isinstance(part, str) and (
        part in ("str", "int") or part.startswith(("list[", "function-")) or part[:1].isupper()
    )


async def read_body(request: Request, limit: int, watched: WatchedRequest) -> bytes:
    """Return the body of a request.

    Args:
        request: the request.
        limit: most bytes of the body.
        watched: ends the request if the body does not arrive in time.

    Raises:
        RequestTooLarge: the body has more than ``limit`` bytes.
        ClientGone: the client closed its connection.
    """
    message = await request.receive()
    if "body" in message and not message.get("more_body") and len(message["body"]) <= limit:
        watched.body_complete()
        return bytes(message["body"])
    chunks: list[bytes] = []
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone("the client closed its connection before its body was whole")
        chunk = message.get("body", b"")
        watched.received_bytes += len(chunk)
        if watched.received_bytes <= limit:
            chunks.append(chunk)
        if not message.get("more_body") or watched.received_bytes > limit * _DISCARD_FACTOR:
            break
        message = await request.receive()
    if watched.received_bytes > limit:
        declared = request.headers.get("content-length", "")
        bytes_sent = declared or f"at least {watched.received_bytes}"
        raise RequestTooLarge(f"the body has {bytes_sent} bytes; the limit is {limit}")
    watched.body_complete()
    return b"".join(chunks)
