"""Paths that several protocols have: the fields of a body choose the protocol.

The path decides on the shape of an error, because a body may not be readable. So errors of these
paths have the fields that the clients of each protocol read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, Union

from pydantic import AfterValidator, Field, RootModel, create_model

from cloze.service.core import ServedRequest
from cloze.service.errors import InvalidBody
from cloze.service.http.body import load, validate
from cloze.service.http.errors import ErrorInfo
from cloze.service.models.pipeline import Models, Pipeline
from cloze.service.protocols.protocol import ProtocolContext, TaskRoute, WireProtocol

_NO_MODEL: Final = "default/not-specified"
"""The name that Infinity's client sends where its user names no model."""

ServedName = Annotated[
    str | None,
    AfterValidator(lambda name: None if name == _NO_MODEL else name),
    Field(description="a served model, NAME or NAME@VERSION; the default is the task's default"),
]

Flag = Annotated[
    bool | Literal["true", "false"] | None,
    AfterValidator(lambda flag: flag == "true" if isinstance(flag, str) else flag),
]
"""A boolean, which RAGFlow sends as a text."""


@dataclass(frozen=True, slots=True)
class SharedErrorBody:
    """An error of a path of several protocols.

    text-embeddings-inference, Weaviate and our own clients read ``error``, Cohere's ``message``,
    and Jina's and Voyage's ``detail``.
    """

    error: str
    error_type: str
    code: str
    message: str
    detail: str


def _error_body(error: ErrorInfo) -> SharedErrorBody:
    message = error.message
    return SharedErrorBody(message, error.kind, error.code, message, message)


class _OneOf(RootModel[Any], defer_build=True):
    """The body of a path of several protocols, for the documentation."""


class SharedRoute(TaskRoute):
    """A path of several protocols.

    Args:
        own: the route for a body with `field`, and for one that is no object.
        field: the field of a body by which the route is chosen.
        others: field -> another route, for a body with the field.
    """

    def __init__(
        self, context: ProtocolContext, own: TaskRoute, field: str, others: Mapping[str, TaskRoute]
    ) -> None:
        self._by_field = {field: own, **others}
        self._routes = [*dict.fromkeys(self._by_field.values())]
        docs = [route.doc for route in self._routes]
        self.task = own.task
        name = "Or".join(route.body.__name__ for route in self._routes)
        bodies: Any = Union[tuple(route.body for route in self._routes)]  # noqa: UP007
        self.body = create_model(name, __base__=_OneOf, __doc__=None, root=(bodies, ...))
        self.doc = replace(
            own.doc,
            result=Union[tuple(doc.result for doc in docs)],  # noqa: UP007
            examples={title: body for doc in docs for title, body in doc.examples.items()},
            headers={name: header for doc in docs for name, header in doc.headers.items()},
        )
        super().__init__(context)

    def _serving(self, models: Models) -> Sequence[Pipeline]:
        return [*dict.fromkeys(p for route in self._routes for p in route.serving(models))]

    def parse(self, _: ServedRequest, data: bytes) -> tuple[TaskRoute, Any]:
        """Return the route whose field a body has, and the body.

        Raises:
            InvalidBody: the body has fields of several routes, or of none.
        """
        value = load(data, self.context.body_limits)
        route = self._routes[0]
        if isinstance(value, dict):
            fields = [name for name in self._by_field if value.get(name) is not None]
            routes = {id(self._by_field[name]) for name in fields}
            if len(routes) > 1:
                raise InvalidBody(
                    f"the request has {' and '.join(fields)}, which are of different protocols; "
                    "send one of them"
                )
            if not fields:
                known = ", ".join(self._by_field)
                raise InvalidBody(f"the request has none of {known}; one of them is required")
            route = self._by_field[fields[0]]
        return route, validate(route.body, value)


PROTOCOL: Final = WireProtocol(
    lambda _: (), ("/rerank", "/score", "/classify"), SharedErrorBody, _error_body, has_422=True
)
"""The errors of the shared paths, whose routes the protocols bind."""
