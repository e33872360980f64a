"""The Open Inference Protocol, version 2, over REST: ``/v2``, as KServe and Triton's clients speak.

Each task of each served model is a model of the protocol, ``<bundle>.<task>``. Texts are tensors of
the datatype BYTES, in JSON or in the binary extension. `tensors` has the names of the tensors.

Source: https://github.com/kserve/open-inference-protocol, ``specification/protocol``, and the
binary tensor data extension of Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Final, Literal
from urllib.parse import unquote

from pydantic import BaseModel, Field, create_model
from starlette.requests import Request
from starlette.responses import Response

from cloze.model_store.installation import DISTRIBUTION
from cloze.service import errors
from cloze.service.core import ServedRequest
from cloze.service.http.body import BytesResponse, load, validate
from cloze.service.http.routes import RAW, RECORD, Route, RouteDoc
from cloze.service.models.pipeline import Models, Pipeline
from cloze.service.protocols.protocol import (
    STATUSES_WITHOUT_422,
    TIMING_HEADERS,
    ProtocolContext,
    TaskRoute,
    WireProtocol,
    answer_probe,
    answer_task,
    gate_models,
    get_route,
    json_response,
)
from cloze.service.protocols.tensors import (
    JSON_LENGTH,
    TaskTensors,
    TensorMetadata,
    read_texts,
    split,
    write_tensor,
)
from cloze.service.tasks import Task
from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.wire import WireModel

_TAG: Final = "Open Inference Protocol"


class InferInput(WireModel):
    """An input tensor; ``data`` is absent if the tensor follows the JSON as bytes."""

    name: str
    shape: list[int] = Field(max_length=8)
    datatype: Literal["BYTES"]
    parameters: dict[str, Any] | None = None
    data: list[str | list[str]] | None = None


class InferOutput(WireModel):
    """An output tensor that a client asks for."""

    name: str
    parameters: dict[str, Any] | None = None


class InferBody(WireModel):
    """The body of ``POST /v2/models/{model}/infer``."""

    inputs: list[InferInput]
    id: str | None = Field(None, max_length=1024, description="returned with the answer")
    outputs: list[InferOutput] | None = Field(None, description="the default is all")
    parameters: dict[str, Any] | None = Field(
        None, description="parameters of the task, and binary_data_output"
    )


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """An output tensor; ``data`` is absent if the tensor follows the JSON as bytes."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, int] | None = None
    data: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class InferAnswer:
    """The response to ``POST /v2/models/{model}/infer``."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class OpenInferenceErrorBody:
    """An error in the protocol's shape."""

    error: str


def _answer_type(title: str, path: str, **fields: Any) -> type[BaseModel]:
    """Return the type of the response to a GET request, for the documentation."""
    described: dict[str, Any] = {name: (kind, ...) for name, kind in fields.items()}
    return create_model(title, __doc__=f"The response to ``GET {path}``.", **described)


_MODEL: Final = "/v2/models/{model}"

_SERVER = _answer_type("ServerMetadata", "/v2", name=str, version=str, extensions=list[str])
_LIVE = _answer_type("Live", "/v2/health/live", live=Literal[True])
_READY = _answer_type("Ready", "/v2/health/ready", ready=Literal[True])
_NAMES = _answer_type("ModelNames", "/v2/models", models=list[str])
_MODEL_READY = _answer_type("ModelReady", f"{_MODEL}/ready", name=str, ready=Literal[True])
_TENSORS = {"inputs": list[TensorMetadata], "outputs": list[TensorMetadata]}
_METADATA = _answer_type(
    "ModelMetadata", _MODEL, name=str, versions=list[str], platform=str, **_TENSORS
)


class _TaskModel(TaskRoute):
    """One task, as the models of the protocol that do it."""

    body = InferBody

    def __init__(self, task: Task, context: ProtocolContext) -> None:
        self.task, self.tensors = task, TaskTensors(task)
        super().__init__(context)

    def in_body(self, at: errors.Location, _: Any) -> errors.Location:
        """Return the element of a tensor: ``context[3]`` for ``inputs[3].context``."""
        if at[:1] != INPUTS:
            return at
        fields = [part for part in at[1:] if isinstance(part, str)]
        numbers = [part for part in at[1:] if isinstance(part, int)]
        return errors.Location(((fields or [self.tensors.inputs[0].name])[0], *numbers))

    def parse(self, request: ServedRequest, data: bytes) -> tuple[TaskRoute, Any]:
        """Return the route, and a body whose tensors have the data that follows the JSON."""
        head, binary = split(data, request.first.get(JSON_LENGTH.encode()))
        body = validate(InferBody, load(head, self.context.body_limits))
        tensors = []
        for tensor in body.inputs:
            size = (tensor.parameters or {}).get("binary_data_size")
            if size is not None:
                at = _location(tensor)
                if not isinstance(size, int):
                    problem = (
                        f"has the binary_data_size {errors.quoted(str(size))}, no whole number"
                    )
                    raise errors.InvalidRequest(problem, at)
                if not 0 <= size <= len(binary):
                    problem = f"has the binary_data_size {size}; {len(binary)} bytes are left"
                    raise errors.InvalidRequest(problem, at)
                if tensor.data is not None:
                    raise errors.InvalidRequest("has both data and binary_data_size", at)
                texts = read_texts(binary[:size], at, self.context.max_request_texts)
                tensor = tensor.model_copy(update={"data": texts})
                binary = binary[size:]
            tensors.append(tensor)
        if binary:
            raise errors.InvalidRequest(f"{len(binary)} bytes after the JSON belong to no tensor")
        return self, body.model_copy(update={"inputs": tensors})

    def to_call(self, _: ServedRequest, body: InferBody) -> tuple[Any, Any]:
        known = [tensor.name for tensor in self.tensors.outputs]
        for output in body.outputs or ():
            if output.name not in known:
                problem = (
                    f"names {errors.quoted(output.name)}; {self.task.name} has {', '.join(known)}"
                )
                raise errors.InvalidRequest(problem, errors.Location(("outputs",)))
        texts: dict[str, list[str]] = {}
        for tensor in body.inputs:
            if tensor.name in texts:
                raise errors.InvalidRequest(f"has {errors.quoted(tensor.name)} twice", INPUTS)
            texts[tensor.name] = _texts(tensor)
        given = dict(body.parameters or {})
        given.pop("binary_data_output", None)  # of the protocol, not of the task
        parameters = validate(self.task.parameters, given, errors.Location(("parameters",)))
        if getattr(parameters, "return_offsets", None):
            problem = "asks for offsets, which no tensor has; POST /embed_all returns them"
            raise errors.InvalidRequest(problem, errors.Location(("parameters", "return_offsets")))
        return self.tensors.to_inputs(texts), parameters

    def respond(self, request: ServedRequest, body: InferBody, value: Any) -> BytesResponse:
        model, _, number = request.model.rpartition("@")
        default = (body.parameters or {}).get("binary_data_output", False)
        asked = {output.name: output.parameters or {} for output in body.outputs or ()}
        outputs = self.tensors.to_outputs(value, asked, body.inputs[0].shape[0])
        datatypes = {tensor.name: tensor.datatype for tensor in self.tensors.outputs}
        rows, parts = [], []
        for name, data in outputs.items():
            shape = [len(data)] if isinstance(data, list) else list(data.shape)
            row: dict[str, Any] = {"name": name, "shape": shape, "datatype": datatypes[name]}
            if asked.get(name, {}).get("binary_data", default):
                parts.append(write_tensor(data))
                row["parameters"] = {"binary_data_size": len(parts[-1])}
            else:
                row["data"] = data if isinstance(data, list) else data.reshape(-1)
            rows.append(row)
        answer: dict[str, Any] = {"model_name": f"{model}.{self.task.name}"}
        answer |= {"model_version": number, "outputs": rows}
        if body.id is not None:
            answer["id"] = body.id
        head = json_response(answer, in_parts=request.is_large)
        if not parts:
            return head
        length = (JSON_LENGTH.encode(), b"%d" % len(head.body))
        return BytesResponse(b"".join((head.body, *parts)), RAW.encode(), length)


def _location(tensor: InferInput) -> errors.Location:
    """Return the location of a tensor, by its name in ASCII."""
    return errors.Location((errors.quoted(tensor.name)[1:-1],))


def _texts(tensor: InferInput) -> list[str]:
    """Return the texts of an input tensor [n] or [n, 1]."""
    at = _location(tensor)
    if len(tensor.shape) not in (1, 2) or tensor.shape[1:] not in ([], [1]):
        raise errors.InvalidRequest(
            f"has the shape {str(tensor.shape[:9])[:80]}; send [n] or [n, 1]", at
        )
    if tensor.data is None:
        raise errors.InvalidRequest("has neither data nor binary_data_size", at)
    texts: list[str] = []
    for item in tensor.data:
        texts += item if isinstance(item, list) else [item]
    if len(texts) != tensor.shape[0]:
        raise errors.InvalidRequest(f"has {len(texts)} texts; its shape says {tensor.shape[0]}", at)
    return texts


class _Server:
    def __init__(self, context: ProtocolContext) -> None:
        self._context = context
        self._tasks = {name: _TaskModel(task, context) for name, task in context.tasks.items()}

    def _find(self, request: Request) -> tuple[_TaskModel, Pipeline]:
        """Return the task and the served model that a path names."""
        name, number = unquote(request.path_params["model"]), request.path_params.get("version")
        bundle, _, task = name.rpartition(".")
        model = self._tasks.get(task)
        models = self._context.models_of(request.scope[RECORD])
        if model is None or not bundle:
            example = f"a name is <bundle>.<task>, such as {_names(models)[0]}"
            raise errors.UnknownModel(f"no model {errors.quoted(name)} is served; {example}")
        try:
            chosen = models.choose(model.task, bundle if number is None else f"{bundle}@{number}")
        except errors.WrongTask as error:
            raise errors.UnknownModel(
                f"no model {errors.quoted(name)} is served: {error}"
            ) from None
        return model, chosen

    async def server(self, _: Request) -> Response:
        about = {"name": "cloze", "version": version(DISTRIBUTION)}
        return json_response(about | {"extensions": ["binary_tensor_data"]})

    async def models(self, request: Request) -> Response:
        return json_response({"models": _names(self._context.models_of(request.scope[RECORD]))})

    async def model(self, request: Request) -> Response:
        model, pipeline = self._find(request)
        bundle = pipeline.manifest.name
        models = self._context.models_of(request.scope[RECORD])
        served = [other.manifest for other in models.serving(model.task)]
        answer = {
            "name": f"{bundle}.{model.task.name}",
            "versions": [str(other.version) for other in served if other.name == bundle],
            "platform": "onnxruntime_onnx",
            "inputs": model.tensors.inputs,
            "outputs": model.tensors.outputs,
        }
        return json_response(answer)

    async def model_ready(self, request: Request) -> Response:
        model, pipeline = self._find(request)
        answer = {"name": f"{pipeline.manifest.name}.{model.task.name}", "ready": True}
        return await answer_probe(self._context.state.why_unready, answer, request)

    async def infer(self, request: Request) -> Response:
        model, pipeline = self._find(request)
        return await answer_task(self._context, model.parse, request, pipeline)


def _names(models: Models) -> list[str]:
    """Return the names of the protocol's models: each task of each served model."""
    pairs = [(p.manifest.name, task) for p in models.pipelines for task in models.tasks_of[p]]
    return list(dict.fromkeys(f"{bundle}.{task}" for bundle, task in pairs))


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the routes of the protocol."""
    server, state = _Server(context), context.state
    get = partial(get_route, tag=_TAG, error_body=OpenInferenceErrorBody)
    live = partial(answer_probe, state.why_restart, {"live": True})
    ready = partial(answer_probe, state.why_unready, {"ready": True})
    found = [
        get("/v2", server.server, "The server and its extensions", _SERVER),
        get("/v2/health/live", live, "Liveness: 503 once an engine is dead", _LIVE, 503),
        get("/v2/health/ready", ready, "Readiness: 503 while draining or dead", _READY, 503),
        get("/v2/models", server.models, "The names of the models", _NAMES),
    ]
    every_model = gate_models(context.models.pipelines)
    for path in (_MODEL, f"{_MODEL}/versions/{{version}}"):
        found += [
            get(path, server.model, "The tensors of a model", _METADATA, 404),
            get(
                f"{path}/ready", server.model_ready, "Readiness of a model", _MODEL_READY, 404, 503
            ),
            Route("POST", f"{path}/infer", server.infer, _INFER, every_model),
        ]
    return found


_TEXT: Final = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["A cat sat."]}

_INFER: Final = RouteDoc(
    summary="The results of one task of one model, as tensors",
    tag=_TAG,
    result=InferAnswer,
    error_body=OpenInferenceErrorBody,
    body=InferBody,
    examples={"One text": {"inputs": [_TEXT]}},
    media_types=(RAW,),
    headers={**TIMING_HEADERS, JSON_LENGTH: ("integer", "bytes of the JSON before the tensors")},
    errors=STATUSES_WITHOUT_422,
)

PROTOCOL: Final = WireProtocol(
    ("/v2",), routes, lambda error: OpenInferenceErrorBody(error.message)
)
