"""A route: its path, its handler and its documentation; the way to the handlers of POST routes."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cloze.service.core import ServiceError
from cloze.service.http.access import Access
from cloze.service.http.gate import GateModel
from cloze.service.http.record import RECORD
from cloze.service.http.recorder import Respond

JSON = "application/json"
RAW = "application/octet-stream"
NPY = "application/x-npy"
TEXT = "text/plain"
HTML = "text/html"


class BytesResponse(Response):
    """A response with a body of bytes.

    Starlette encodes each header of each response; here the headers are bytes already.

    Args:
        body: the body.
        media_type: the value of ``content-type``.
        headers: further headers, with names in lower case.
    """

    def __init__(
        self, body: bytes, media_type: bytes = b"application/json", *headers: tuple[bytes, bytes]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = body
        self.raw_headers = [
            (b"content-length", b"%d" % len(body)),
            (b"content-type", media_type),
            *headers,
        ]


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """The documentation of a route in OpenAPI.

    Attributes:
        summary: one line.
        tag: the group of the route in the documentation.
        result: the type of the response's JSON; None if the response has no JSON.
        error_body: the type of an error's JSON.
        body: the model of the request's body; None if the request has no body.
        examples: request bodies by title.
        media_types: media types of the response besides JSON.
        headers: headers of the response: name -> (type, description).
        errors: error statuses that the route may return.
    """

    summary: str
    tag: str
    result: Any
    error_body: Any
    body: type[BaseModel] | None = None
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    media_types: tuple[str, ...] = ()
    headers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    errors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the HTTP interface with its handler.

    Attributes:
        method: HTTP method.
        path: the path, which begins with ``/``.
        handler: returns the response to a request.
        doc: the documentation of the route.
        models: the served models that may answer, the default first. Their gate refuses requests
            of the route while the server is full. None: the route is for operators.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    doc: RouteDoc
    models: Sequence[GateModel] | None = None


class DirectRoutes:
    """The ASGI application of all routes, which calls the handlers of POST routes without a router.

    `docs/decisions/0007` has the measured difference.

    Args:
        router: answers all other requests.
        handlers: the handlers of POST routes by path.
        access: decides who may send a request.
        respond: returns the response to a `ServiceError` of a handler.
    """

    def __init__(
        self, router: ASGIApp, handlers: Mapping[str, Handler], access: Access, respond: Respond
    ) -> None:
        self._router, self._handlers = router, handlers
        self._access, self._respond = access, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request = Request(scope, receive)
        handler = self._handlers.get(scope["path"]) if scope["method"] == "POST" else None
        try:
            self._access.check(scope[RECORD])
            if handler is None:
                await self._router(scope, receive, send)
                return
            response = await handler(request)
        except ServiceError as error:
            response = await self._respond(request, error)
        await response(scope, receive, send)
