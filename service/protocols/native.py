"""The native protocol: one POST route per task, and the routes for operators.

Bodies have the shape of huggingface_hub: ``{"inputs", "parameters"?, "model"?}``. Four routes have
the bodies of text-embeddings-inference, which huggingface_hub sends too; see `_SHARED`. Errors have
the shape of text-embeddings-inference: ``{"error", "error_type"}``.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, create_model
from starlette.requests import Request

from cloze.service.http.errors import ERROR_STATUSES
from cloze.service.http.routes import NPY, RAW, BytesResponse, Route, RouteDoc
from cloze.service.pipeline import TaskResult
from cloze.service.protocols import binary, operations
from cloze.service.protocols.dispatch import DispatchBody, Dispatcher
from cloze.service.protocols.protocol import (
    ErrorBody,
    LenientModel,
    ProtocolContext,
    WireProtocol,
    ignored_fields,
    write_error,
)
from cloze.service.protocols.task_route import TIMING_HEADERS, TaskRoute
from cloze.service.tasks import Task, TaskCall, embed, embed_all, embed_sparse, similarity
from cloze.service.tasks.task import NoParameters, TextUsage, WireModel
from cloze.service.tasks.texts import UsageParameters

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


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return one route per task, and the routes for operators."""
    task_routes = {task.name: task_route(task) for task in context.tasks.values()}
    bound = [route.bind(context) for route in task_routes.values()]
    dispatcher = Dispatcher(task_routes, context).route(_dispatch_doc(task_routes))
    return [*bound, dispatcher, *operations.routes(context, ErrorBody)]


def _dispatch_doc(task_routes: Mapping[str, TaskRoute]) -> RouteDoc:
    examples: dict[str, Mapping[str, Any]] = {}
    for name, route in task_routes.items():
        title, body = next(iter(route.doc.examples.items()))
        examples[f"{name}: {title}"] = body
    return RouteDoc(
        summary="The task that fits the body, for clients that know only this address",
        tag="tasks",
        result=Any,
        error_body=ErrorBody,
        body=DispatchBody,
        examples=examples,
        media_types=(RAW, NPY),
        headers={**TIMING_HEADERS, **binary.VECTOR_HEADERS},
        errors=ERROR_STATUSES,
    )


def task_route(task: Task) -> TaskRoute:
    """Return the native route of a task."""
    at_root = task.name in _PARAMETERS_AT_ROOT
    body = _body(task, at_root=at_root)

    def respond(request: Request, request_body: Any, result: TaskResult) -> BytesResponse:
        value = result.value
        if isinstance(request_body.inputs, task.alone):
            [value] = value
        if result.usage is not None:
            value = {"result": value, "usage": result.usage}
        return binary.respond(request, value)

    def to_call(request_body: Any) -> TaskCall:
        if at_root:
            return TaskCall(request_body.inputs, request_body)
        parameters = getattr(request_body, "parameters", None) or task.parameters()
        return TaskCall(request_body.inputs, parameters)

    doc = RouteDoc(
        summary=task.summary,
        tag="tasks",
        result=_result(task),
        error_body=ErrorBody,
        body=body,
        examples=task.examples,
        media_types=(RAW, NPY) if task.vectors else (),
        headers={**TIMING_HEADERS, **(binary.VECTOR_HEADERS if task.vectors else {})},
        errors=ERROR_STATUSES,
    )
    warnings = ignored_fields if task.name in _SHARED else None
    check = binary.accepted if task.vectors else None
    return TaskRoute(task.route, task, body, to_call, respond, doc, warnings, check)


def _result(task: Task) -> Any:
    """Return the type of a task's response, with the report that clients may ask for."""
    if not issubclass(task.parameters, UsageParameters):
        return task.result
    report = create_model(
        f"{_title(task)}Report", result=(task.result, ...), usage=(list[TextUsage], ...)
    )
    return task.result | report


def _title(task: Task) -> str:
    return "".join(part.title() for part in task.name.split("-"))


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
    examples = [example["inputs"] for example in task.examples.values()]
    inputs = Annotated[task.inputs, Field(examples=examples[:1])] if examples else task.inputs
    fields: dict[str, Any] = {"inputs": (inputs, ...)}
    if not at_root and task.parameters is not NoParameters:
        fields["parameters"] = (parameters | None, None)
    fields["model"] = (ModelName, None)
    base = parameters if at_root else base
    return create_model(
        f"{_title(task)}Body", __base__=base, __doc__=f"``POST {task.route}``.", **fields
    )


PROTOCOL: Final = WireProtocol("native", ("/",), routes, write_error)
