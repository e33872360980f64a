"""Reads and parses request bodies, and cancels requests whose client has disconnected."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from cloze.service.core import (
    ClientGone,
    InvalidRequest,
    MalformedRequest,
    RequestTooLarge,
    SlowRequest,
)

B = TypeVar("B", bound=BaseModel)

_WATCH_AFTER_S = 0.05
"""Time after which a task starts to watch the connection; most requests are answered sooner."""

_DISCARD_FACTOR = 8
"""Multiple of the size limit up to which an oversized body is read and discarded.

Many clients read the error response only after they have sent the whole body.
"""

_INLINE_BYTES = 65_536
"""Largest body that is parsed on the event loop; a thread parses larger bodies."""


async def receive(request: Request, model: type[B], limit: int, timeout_s: float) -> tuple[B, int]:
    """Read and parse the body of a request.

    Args:
        request: the request.
        model: the type of the body.
        limit: most bytes of the body.
        timeout_s: longest time until the body is complete, in seconds.

    Returns:
        The parsed body and its size in bytes.

    Raises:
        RequestError: see `read_body` and `parse`.
    """
    data = await read_body(request, limit, timeout_s)
    if len(data) <= _INLINE_BYTES:
        return parse(model, data), len(data)
    return await asyncio.to_thread(parse, model, data), len(data)


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


async def read_body(request: Request, limit: int, timeout_s: float) -> bytes:
    """Return the body of a request.

    Raises:
        RequestTooLarge: the body has more than ``limit`` bytes.
        SlowRequest: the body is not complete after ``timeout_s``.
        ClientGone: the client closed its connection.
    """
    chunks: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(timeout_s):
            while more and size <= limit * _DISCARD_FACTOR:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client closed its connection before its body was whole")
                chunk, more = message.get("body", b""), message.get("more_body", False)
                size += len(chunk)
                if size <= limit:
                    chunks.append(chunk)
    except TimeoutError:
        raise SlowRequest(
            f"{size} bytes of the body arrived within the limit of {timeout_s * 1000:.0f} ms, "
            "not all"
        ) from None
    if size > limit:
        declared = request.headers.get("content-length", "")
        bytes_sent = declared or f"at least {size}"
        raise RequestTooLarge(f"the body has {bytes_sent} bytes; the limit is {limit}")
    return b"".join(chunks)


@asynccontextmanager
async def client_gone(request: Request) -> AsyncIterator[None]:
    """Cancel the enclosed code when the client closes its connection.

    Raises:
        ClientGone: the client closed its connection.
    """
    gone = False
    watcher: asyncio.Task[None] | None = None
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    def start_watching() -> None:
        nonlocal watcher
        watcher = asyncio.create_task(watch())

    timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, start_watching)
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise ClientGone("the client closed its connection") from None
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
