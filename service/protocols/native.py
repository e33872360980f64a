"""The native protocol: one POST route per task, and the routes for operators.

Bodies have the shape of huggingface_hub: ``{"inputs", "parameters"?, "model"?}``. Four routes have
the bodies of text-embeddings-inference, which huggingface_hub sends too; see `_SHARED`. Errors have
the shape of text-embeddings-inference: ``{"error", "error_type"}``.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import numpy as np
import orjson
from pydantic import BaseModel, Field, create_model
from starlette.requests import Request
from starlette.responses import Response

from cloze.service.core import Float32
from cloze.service.http.errors import STATUS
from cloze.service.http.routes import JSON, NPY, RAW, BytesResponse, Route, RouteDoc
from cloze.service.pipeline import TaskResult
from cloze.service.protocols import operations
from cloze.service.protocols.dispatch import DispatchBody, Dispatcher
from cloze.service.protocols.error_body import ErrorBody, write_error
from cloze.service.protocols.lenient import LenientModel, ignored_fields
from cloze.service.protocols.protocol import ProtocolContext, WireProtocol
from cloze.service.protocols.task_route import TIMING_HEADERS, TaskRoute
from cloze.service.tasks import Task, TaskCall, embed, embed_all, embed_sparse, similarity
from cloze.service.tasks.task import NoParameters, WireModel

ModelName = Annotated[
    str | None,
    Field(description="a served model, NAME or NAME@VERSION; the default is the task's default"),
]

_PARAMETERS_AT_ROOT: Final = frozenset(
    task.name for task in (embed.TASK, embed_all.TASK, embed_sparse.TASK)
)
"""Tasks whose parameters are fields of the body itself, as in text-embeddings-inference."""

_SHARED: Final = _PARAMETERS_AT_ROOT | {similarity.TASK.name}
"""Tasks whose routes text-embeddings-inference has. They ignore unknown fields, and name them."""

_SHAPE: Final = {
    "x-shape": ("string", "shape of raw vectors: rows,columns of little-endian float32")
}


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return one route per task, and the routes for operators."""
    task_routes = {task.name: task_route(task) for task in context.tasks.values()}
    bound = [route.bind(context) for route in task_routes.values()]
    dispatcher = Dispatcher(task_routes, context).route(_dispatch_doc(task_routes))
    return [*bound, dispatcher, *operations.routes(context, ErrorBody)]


def _dispatch_doc(task_routes: Mapping[str, TaskRoute]) -> RouteDoc:
    examples = [next(iter(route.doc.examples.items())) for route in task_routes.values()]
    return RouteDoc(
        summary="The task that fits the body, for clients that know only this address",
        tag="tasks",
        result=Any,
        error_body=ErrorBody,
        body=DispatchBody,
        examples=dict(examples),
        media_types=(RAW, NPY),
        headers={**TIMING_HEADERS, **_SHAPE},
        errors=tuple(sorted({status for status, _ in STATUS.values()})),
    )


def task_route(task: Task) -> TaskRoute:
    """Return the native route of a task."""
    at_root = task.name in _PARAMETERS_AT_ROOT
    body = _body(task, at_root=at_root)

    def to_call(request_body: Any) -> TaskCall:
        if at_root:
            return TaskCall(request_body.inputs, request_body)
        parameters = getattr(request_body, "parameters", None) or task.parameters()
        return TaskCall(request_body.inputs, parameters)

    doc = RouteDoc(
        summary=task.summary,
        tag="tasks",
        result=task.result,
        error_body=ErrorBody,
        body=body,
        examples={example.title: example.body for example in task.examples},
        media_types=(RAW, NPY) if task.vectors else (),
        headers={**TIMING_HEADERS, **(_SHAPE if task.vectors else {})},
        errors=tuple(sorted({status for status, _ in STATUS.values()})),
    )
    warnings = ignored_fields if task.name in _SHARED else None
    return TaskRoute(task.route, task, body, to_call, _respond, doc, warnings)


def _body(task: Task, *, at_root: bool) -> type[BaseModel]:
    """Return the model of a task's request body.

    Args:
        task: the task.
        at_root: whether the parameters are fields of the body itself.
    """
    base: Any = WireModel
    parameters = task.parameters
    if task.name in _SHARED:
        base = LenientModel
        parameters = create_model(
            f"Lenient{parameters.__name__}",
            __base__=(parameters, base),
            __doc__=parameters.__doc__,
        )
    fields: dict[str, Any] = {"inputs": (task.inputs, ...)}
    if not at_root and task.parameters is not NoParameters:
        fields["parameters"] = (parameters | None, None)
    fields["model"] = (ModelName, None)
    name = "".join(part.title() for part in task.name.split("-")) + "Body"
    base = parameters if at_root else base
    return create_model(name, __base__=base, __doc__=f"``POST {task.route}``.", **fields)


_ANY = (b"", b"*/*", b"application/json")
"""Frequent values of ``Accept`` that select JSON, so that they need no parsing."""


def _respond(request: Request, _: Any, result: TaskResult) -> Response:
    if isinstance(result.value, np.ndarray):
        return respond_vectors(request, result.value)
    return BytesResponse(orjson.dumps(result.value, option=orjson.OPT_SERIALIZE_NUMPY))


def respond_vectors(request: Request, values: Float32) -> Response:
    """Return vectors in the format that the client accepts.

    Args:
        request: the request. Its ``Accept`` header selects JSON, raw little-endian float32 with
            the header ``x-shape``, or NumPy's file format.
        values: [n, D] float32.
    """
    accept = next((value for name, value in request.scope["headers"] if name == b"accept"), b"")
    accepted = JSON if accept in _ANY else _accepted(accept.decode("latin-1"))
    vectors = values.astype("<f4", copy=False)
    if accepted == RAW:
        shape = b"%d,%d" % vectors.shape
        return BytesResponse(vectors.tobytes(), RAW.encode(), (b"x-shape", shape))
    if accepted == NPY:
        file = io.BytesIO()
        np.save(file, vectors)
        return BytesResponse(file.getvalue(), NPY.encode())
    return BytesResponse(orjson.dumps(vectors, option=orjson.OPT_SERIALIZE_NUMPY))


def _accepted(header: str) -> str:
    """Return the media type that an ``Accept`` header prefers: JSON, raw float32 or NumPy.

    The result is JSON unless another type has a higher weight (RFC 9110, section 12.5.1).
    """
    best, best_weight = JSON, 0.0
    for item in header.split(","):
        kind, *parameters = (part.strip() for part in item.lower().split(";"))
        weights = [value[2:] for value in parameters if value.startswith("q=")]
        is_number = bool(weights) and weights[0].replace(".", "", 1).isdecimal()
        weight = float(weights[0]) if is_number else 1.0
        if kind not in (JSON, RAW, NPY):
            continue
        if weight > best_weight or (weight == best_weight > 0 and kind == JSON):
            best, best_weight = kind, weight
    return best


PROTOCOL: Final = WireProtocol("native", ("/",), routes, write_error)
