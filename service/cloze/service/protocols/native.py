"""The native protocol: one POST route per task, ``POST /``, and the routes for operators.

Bodies have the shape of huggingface_hub: ``{"inputs", "parameters"?, "model"?}``. Four routes have
the bodies of text-embeddings-inference, which huggingface_hub sends too; see `_SHARED`. Errors have
the shape of text-embeddings-inference: ``{"error", "error_type", "code"}``.

Vectors have the format that a client accepts: JSON, raw bytes or NumPy's file format. The bytes may
have fewer bits per number than float32: ``Accept: application/octet-stream; dtype=int8``.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import make_dataclass
from functools import cache
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, create_model

from cloze.service.core import Float32, ServedRequest
from cloze.service.errors import InvalidRequest, WrongTask
from cloze.service.http.body import BytesResponse, load, validate
from cloze.service.http.routes import JSON, NPY, RAW, Route, RouteDoc
from cloze.service.models.pipeline import Models, Pipeline
from cloze.service.protocols import operations, vllm
from cloze.service.protocols.protocol import (
    ErrorBody,
    LenientModel,
    ProtocolContext,
    TaskRoute,
    WireProtocol,
    error_body,
)
from cloze.service.protocols.shared_paths import SharedRoute
from cloze.service.tasks import (
    Task,
    embed,
    embed_all,
    embed_sparse,
    fill_mask,
    similarity,
    text_classification,
    token_classification,
)
from cloze.service.tasks.task import INPUTS, TextUsage
from cloze.service.tasks.texts import UsageParameters
from cloze.service.tasks.wire import NoParameters, NotEmpty, NotEmptyText, WireModel

ModelName = Annotated[
    str | None,
    Field(description="a served model, NAME or NAME@VERSION; the default is the task's default"),
]

PARAMETERS_AT_ROOT: Final = frozenset(
    task.name for task in (embed.TASK, embed_all.TASK, embed_sparse.TASK)
)
"""Tasks whose parameters are fields of the body itself, as in text-embeddings-inference."""

_SHARED: Final = PARAMETERS_AT_ROOT | {similarity.TASK.name}
"""Tasks whose routes text-embeddings-inference has. They ignore unknown fields, and name them."""

_VECTOR_HEADERS: Final[Mapping[str, tuple[str, str]]] = {
    "x-dtype": ("string", "type of the numbers of raw vectors, little-endian"),
    "x-shape": ("string", "shape of raw vectors: rows,columns"),
    "x-scale": ("number", "what int8 numbers are multiplied by"),
    "x-lengths": ("string", "rows of each text, if a text has a vector per token"),
}


def _routes(context: ProtocolContext) -> Sequence[Route]:
    """Return one route per task, ``POST /``, and the routes for operators."""
    dispatcher, others = Dispatcher(context), vllm.other_routes(context)
    bound = []
    for route in dispatcher.routes.values():
        route.body.model_rebuild()  # takes 0.5 ms, which a first request would notice
        path = route.task.route
        if shared := others.get(path):
            bound.append(SharedRoute(context, route, "inputs", shared).bind(path))
        else:
            bound.append(route.bind(path))
    return [*bound, dispatcher.bind("/"), *operations.routes(context)]


class NativeRoute(TaskRoute):
    """The route of a task in the native protocol."""

    def __init__(self, task: Task, context: ProtocolContext) -> None:
        self.task, self.body = task, body_type(task)
        self.doc = RouteDoc(
            summary=task.summary,
            tag="tasks",
            result=_result_type(task),
            examples=task.examples,
            media_types=(RAW, NPY) if task.vectors else (),
            headers=_VECTOR_HEADERS if task.vectors else {},
        )
        super().__init__(context)

    def to_call(self, request: ServedRequest, body: Any) -> tuple[Any, Any]:
        """Return the inputs and the parameters, and note the format of vectors."""
        if self.task.vectors and (accept := request.first.get(b"accept", b"")) not in _ANY:
            request.vector_format = vector_format(accept)
        if self.task.name in PARAMETERS_AT_ROOT:
            return body.inputs, body
        return body.inputs, getattr(body, "parameters", None) or self.task.parameters()

    def respond(self, request: ServedRequest, body: Any, value: Any) -> Any:
        """Return the results, without the list if the body has one input without a list."""
        if isinstance(body.inputs, self.task.alone):
            [value] = value
        if request.usage is not None:
            return {"result": value, "usage": request.usage}
        if request.vector_format and not getattr(body, "return_offsets", None):
            return vector_bytes(value, *request.vector_format)
        return value


@cache
def body_type(task: Task) -> type[BaseModel]:
    """Return the model of the body of a task's native route; making one takes milliseconds."""
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
    if task.name in PARAMETERS_AT_ROOT:
        base = parameters
    elif task.parameters is not NoParameters:
        fields["parameters"] = (parameters | None, None)
    fields["model"] = (ModelName, None)
    return create_model(
        f"{_title(task)}Body", __base__=base, __doc__=f"``POST {task.route}``.", **fields
    )


@cache
def _result_type(task: Task) -> Any:
    """Return the type of a task's response, with the report that clients may ask for."""
    if not issubclass(task.parameters, UsageParameters):
        return task.result
    fields = [("result", task.result), ("usage", list[TextUsage])]
    return task.result | make_dataclass(f"{_title(task)}Report", fields)


def _title(task: Task) -> str:
    return "".join(part.title() for part in task.name.split("-"))


_ANY = (b"", b"*/*", b"application/json")
"""Frequent values of ``Accept`` that select JSON, so that they need no parsing."""

_LONGEST_ACCEPT = 1000
"""Most bytes of ``Accept`` that are parsed."""


def _int8(values: Float32) -> tuple[NDArray[Any], float]:
    """Return integers and their scale: the largest absolute value becomes 127."""
    scale = float(np.abs(values).max(initial=0.0)) / 127 or 1.0
    return np.rint(values / np.float32(scale)).astype(np.int8), scale


DTYPES: Final[Mapping[str, Callable[[Float32], tuple[NDArray[Any], float | None]]]] = {
    "float32": lambda values: (values.astype("<f4", copy=False), None),
    "float16": lambda values: (values.astype("<f2"), None),
    "int8": _int8,
    "ubinary": lambda values: (np.packbits(values > 0, axis=1), None),
}
"""Conversions of vectors [n, D]. ``ubinary`` has the signs of 8 numbers per byte, the last one
filled up with zeros: [n, ceil(D / 8)]."""


def vector_format(accept: bytes) -> tuple[str, str] | None:
    """Return the media type that a client prefers, raw bytes or NumPy, and its dtype; None: JSON.

    The type is JSON unless another type has a higher weight (RFC 9110, section 12.5.1).

    Raises:
        InvalidRequest: there is no such dtype, or the header is too long.
    """
    if len(accept) > _LONGEST_ACCEPT:
        raise InvalidRequest(f"Accept has {len(accept)} bytes; the limit is {_LONGEST_ACCEPT}")
    choices = [(0.0, True, JSON, "float32")]
    for item in accept.decode("latin-1").lower().split(","):
        kind, *rest = (part.strip() for part in item.split(";"))
        if kind in ("*/*", "application/*"):
            kind = JSON
        if kind in (JSON, RAW, NPY):
            parameters = dict(part.partition("=")[::2] for part in rest)
            quality = parameters.get("q", "1")
            weight = float(quality) if quality.replace(".", "", 1).isdecimal() else 1.0
            dtype = parameters.get("dtype", "float32").strip('"')
            choices.append((weight, kind == JSON, kind, dtype))
    *_, kind, dtype = max(choices, key=lambda choice: choice[:2])
    if dtype not in DTYPES:
        raise InvalidRequest(f"Accept asks for dtype {dtype[:40]!a}; there are {', '.join(DTYPES)}")
    return (kind, dtype) if kind != JSON else None


def vector_bytes(value: Float32 | list[Float32], kind: str, dtype: str) -> BytesResponse:
    """Return vectors [n, D], or arrays [S, D] one after another, as `RAW` or `NPY`."""
    rows = np.concatenate(value) if isinstance(value, list) else value
    converted, scale = DTYPES[dtype](rows)
    content = io.BytesIO()
    if kind == NPY:
        np.save(content, converted)
    else:
        content.write(converted.tobytes())
    headers = [(b"x-dtype", dtype.encode()), (b"x-shape", b"%d,%d" % converted.shape)]
    if scale is not None:
        headers.append((b"x-scale", b"%.9g" % scale))
    if isinstance(value, list):
        headers.append((b"x-lengths", b",".join(b"%d" % len(rows) for rows in value)))
    return BytesResponse(content.getvalue(), kind.encode(), *headers)


class DispatchBody(LenientModel):
    """A body of any task that ``POST /`` knows; the route of the task documents its fields."""

    inputs: Annotated[Any, NotEmptyText, NotEmpty] = Field(description="the inputs of the task")
    parameters: dict[str, Any] | None = Field(None, description="its parameters")


class Dispatcher(TaskRoute):
    """The route ``POST /``, which chooses the task from the body.

    Clients that know only a base address send every task there: ``InferenceClient(base_url=...)``
    of huggingface_hub, and text-embeddings-inference's own users.

    Attributes:
        routes: the native route of each task that the server offers, by the task's name.
    """

    body = DispatchBody

    def __init__(self, context: ProtocolContext) -> None:
        tasks = context.tasks.values()
        self.routes = {task.name: NativeRoute(task, context) for task in tasks}
        first = [(task.name, *next(iter(task.examples.items()))) for task in tasks]
        self.doc = RouteDoc(
            summary="The task that fits the body, for clients that know only this address",
            tag="tasks",
            result=Any,
            examples={f"{name}: {title}": body for name, title, body in first},
            media_types=(RAW, NPY),
            headers=_VECTOR_HEADERS,
        )
        super().__init__(context)

    def _serving(self, models: Models) -> Sequence[Pipeline]:
        return models.pipelines

    def parse(self, request: ServedRequest, data: bytes) -> tuple[TaskRoute, BaseModel]:
        """Return the route of the task that a body asks for, and the body of that task."""
        return self.read(request, load(data, self.context.body_limits))

    def read(self, request: ServedRequest, value: Any) -> tuple[TaskRoute, BaseModel]:
        """Return the route and the body of the task that the JSON of a body asks for."""
        route = self.route_of(value, self.context.models_of(request))
        return route, validate(route.body, value)

    def route_of(self, value: Any, models: Models) -> NativeRoute:
        """Return the route of the task that the JSON of a body asks for.

        Raises:
            InvalidRequest: the body fits no task, or two.
            WrongTask: the server does not offer the task.
        """
        task = self._choose(validate(DispatchBody, value), models)
        if (route := self.routes.get(task.name)) is None:
            raise WrongTask(f"this server does not offer {task.name}")
        return route

    def _choose(self, body: DispatchBody, models: Models) -> Task:
        """Return the task that a body asks for.

        A body that fits text and token classification needs exactly one of the two to be served.
        """
        tasks = self.context.tasks.values()
        by_field = {field: task for task in tasks for field in task.own_fields}
        texts = body.inputs if isinstance(body.inputs, list) else [body.inputs]
        for item in texts:
            if isinstance(item, dict):
                if task := next((by_field[field] for field in by_field if field in item), None):
                    return task
                known = ", ".join(by_field)
                problem = f"has an object that fits no task: it has none of {known}"
                raise InvalidRequest(problem, INPUTS)
        for task in tasks:
            if any(name in task.own_parameters for name in body.parameters or ()):
                return task
        masks = models.default(fill_mask.TASK)
        mask = masks.manifest.tokenizer.mask_token if masks else None
        if mask and any(isinstance(text, str) and mask in text for text in texts):
            return fill_mask.TASK
        if body.parameters is None:
            return embed.TASK
        alike = (text_classification.TASK, token_classification.TASK)
        served = [task for task in alike if models.serving(task)]
        if len(served) == 1:
            return served[0]
        addresses = " or ".join(task.route for task in alike)
        kinds = "both of them are" if served else "neither of them is"
        raise InvalidRequest(
            f"without a mask and with parameters may be for {addresses}, and {kinds} "
            "served; send the request to the route of its task",
            INPUTS,
        )


PROTOCOL: Final = WireProtocol(_routes, ("",), ErrorBody, error_body, has_422=True)
