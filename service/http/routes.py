"""A route: its path, its handler, and all that OpenAPI says of it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

JSON = "application/json"
RAW = "application/octet-stream"
NPY = "application/x-npy"
TEXT = "text/plain"

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """What OpenAPI says of a route.

    Attributes:
        summary: one line.
        tag: the group in the documentation.
        result: the type of the answer's JSON; None: the answer has no JSON.
        body: the model of the request's body; None: there is no body.
        examples: request bodies by title.
        media_types: of the answer, besides JSON.
        headers: of the answer: name -> (type, description).
        errors: statuses that the route may answer.
        error_body: the type of an error's JSON.
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
    """A route.

    Attributes:
        task: the name of the task that the route serves; None: it serves none.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    doc: RouteDoc
    task: str | None = None
