"""The Open Inference Protocol, version 2, over REST: ``/v2``, as KServe and Triton's clients speak.

Each task of each served model is a model of the protocol, ``<bundle>.<task>``. Texts are tensors of
the datatype BYTES, in JSON or in the binary extension. `tensors` has the names of the tensors.

Source: https://github.com/kserve/open-inference-protocol, ``specification/protocol``, and the
binary tensor data extension of Triton.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final
from urllib.parse import unquote

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cloze.model_store.installation import DISTRIBUTION
from cloze.service.core import InvalidRequest, Location, UnknownModel, WrongTask
from cloze.service.http.errors import ERROR_STATUSES, ErrorInfo, without_422
from cloze.service.http.json_bodies import parse, run_anywhere, validate
from cloze.service.http.record import RECORD, RequestRecord
from cloze.service.http.routes import RAW, BytesResponse, Handler, Route, RouteDoc
from cloze.service.pipeline import Pipeline, TaskResult
from cloze.service.protocols.binary import JSON_LENGTH, read_texts, split, write_tensor
from cloze.service.protocols.open_inference_types import (
    ErrorBody,
    InferAnswer,
    InferBody,
    InferInput,
    Live,
    ModelMetadata,
    ModelNames,
    ModelReady,
    Ready,
    ServerMetadata,
    TensorMetadata,
)
from cloze.service.protocols.protocol import (
    ApiLimits,
    ProtocolContext,
    WireProtocol,
    check,
    json_response,
)
from cloze.service.protocols.task_route import TIMING_HEADERS, Endpoint, TaskRoute, gate_models
from cloze.service.protocols.tensors import TaskTensors, Tensor, TensorInfo
from cloze.service.tasks import Task, TaskCall
from cloze.service.tasks.task import INPUTS

_TAG: Final = "Open Inference Protocol"
_EXTENSIONS: Final = ("binary_tensor_data",)
_PLATFORM: Final = "onnxruntime_onnx"

_OWN_PARAMETERS: Final = ("binary_data_output",)
"""Parameters of a request that belong to the protocol, not to the task."""


def write_error(error: ErrorInfo) -> tuple[int, Mapping[str, Any]]:
    """Return the status and the body of an error. The protocol uses status 400 instead of 422."""
    return without_422(error.status), {"error": error.message}


class _TaskModel:
    """One task, as the models of the protocol that do it.

    Args:
        task: the task.
        context: the parts of the service that the handler uses.
    """

    def __init__(self, task: Task, context: ProtocolContext) -> None:
        self.task, self.tensors = task, TaskTensors(task)
        doc = RouteDoc(task.summary, _TAG, InferAnswer, ErrorBody)
        route = TaskRoute("", task, InferBody, self._to_call, self._respond, doc)
        self.endpoint = Endpoint(route, context)

    def _to_call(self, body: InferBody) -> TaskCall:
        known = {info.name for info in self.tensors.outputs}
        for output in body.outputs or ():
            if output.name not in known:
                raise InvalidRequest(
                    f"names {ascii(output.name)[:80]}; {self.task.name} has "
                    f"{', '.join(info.name for info in self.tensors.outputs)}",
                    Location(("outputs",)),
                )
        texts: dict[str, list[str]] = {}
        for tensor in body.inputs:
            if tensor.name in texts:
                raise InvalidRequest(f"has {ascii(tensor.name)[:80]} twice", INPUTS)
            texts[tensor.name] = _texts(tensor)
        given = body.parameters or {}
        given = {name: value for name, value in given.items() if name not in _OWN_PARAMETERS}
        parameters = validate(self.task.parameters, given, Location(("parameters",)))
        return TaskCall(self.tensors.to_inputs(texts), parameters)

    def _respond(self, request: Request, body: InferBody, result: TaskResult) -> BytesResponse:
        asked = None if not body.outputs else {output.name for output in body.outputs}
        record: RequestRecord = request.scope[RECORD]
        manifest_name, _, manifest_version = record.model.rpartition("@")
        default = bool((body.parameters or {}).get("binary_data_output"))
        binary = {
            output.name: bool((output.parameters or {}).get("binary_data", default))
            for output in body.outputs or ()
        }
        rows, parts = [], []
        inputs = body.inputs[0].shape[0]
        for tensor in self.tensors.to_outputs(result.value, asked, inputs):
            row: dict[str, Any] = {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "datatype": tensor.datatype,
            }
            if binary.get(tensor.name, default):
                parts.append(write_tensor(tensor))
                row["parameters"] = {"binary_data_size": len(parts[-1])}
            else:
                row["data"] = _flat(tensor)
            rows.append(row)
        answer: dict[str, Any] = {
            "model_name": f"{manifest_name}.{self.task.name}",
            "model_version": manifest_version,
            "outputs": rows,
        }
        if body.id is not None:
            answer["id"] = body.id
        head = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
        if not parts:
            return BytesResponse(head)
        length = (JSON_LENGTH.encode(), b"%d" % len(head))
        return BytesResponse(b"".join((head, *parts)), RAW.encode(), length)


def _place(tensor: InferInput) -> Location:
    """Return the place of a tensor, by its name in ASCII."""
    return Location((ascii(tensor.name)[1:-1][:80],))


def _flat(tensor: Tensor) -> Any:
    """Return the data of a tensor in one list, row by row."""
    return tensor.data if isinstance(tensor.data, list) else tensor.data.reshape(-1)


def _texts(tensor: InferInput) -> list[str]:
    """Return the texts of an input tensor [n] or [n, 1].

    Raises:
        InvalidRequest: it has another shape, or no data.
    """
    at = _place(tensor)
    if len(tensor.shape) not in (1, 2) or tensor.shape[1:] not in ([], [1]):
        raise InvalidRequest(f"has the shape {str(tensor.shape)[:80]}; send [n] or [n, 1]", at)
    if tensor.data is None:
        raise InvalidRequest("has neither data nor binary_data_size", at)
    texts: list[str] = []
    for item in tensor.data:
        texts += item if isinstance(item, list) else [item]
    if len(texts) != tensor.shape[0]:
        raise InvalidRequest(f"has {len(texts)} texts; its shape says {tensor.shape[0]}", at)
    return texts


class _Server:
    """The handlers of the routes.

    Args:
        context: the parts of the service that the handlers use.
    """

    def __init__(self, context: ProtocolContext) -> None:
        self._context = context
        self._tasks = {name: _TaskModel(task, context) for name, task in context.tasks.items()}

    def _find(self, request: Request) -> tuple[_TaskModel, Pipeline]:
        """Return the task and the served model that a path names.

        Raises:
            UnknownModel: there is none.
        """
        name, number = unquote(request.path_params["model"]), request.path_params.get("version")
        bundle, _, task = name.rpartition(".")
        model = self._tasks.get(task)
        models = self._context.models
        if model is None or not bundle:
            raise UnknownModel(
                f"no model {ascii(name)[:80]} is served; a name is <bundle>.<task>, "
                f"such as {self._names()[0]}"
            )
        try:
            chosen = models.choose(model.task, bundle if number is None else f"{bundle}@{number}")
        except WrongTask as error:
            raise UnknownModel(f"no model {ascii(name)[:80]} is served: {error}") from None
        return model, chosen

    def _names(self) -> list[str]:
        models = self._context.models
        return list(
            dict.fromkeys(
                f"{pipeline.manifest.name}.{task}"
                for pipeline in models.pipelines
                for task in models.tasks_of(pipeline)
            )
        )

    async def server(self, _: Request) -> Response:
        return json_response(ServerMetadata("cloze", version(DISTRIBUTION), list(_EXTENSIONS)))

    async def live(self, _: Request) -> Response:
        check(self._context.state.broken())
        return json_response(Live(True))

    async def ready(self, _: Request) -> Response:
        check(self._context.state.unready())
        return json_response(Ready(True))

    async def models(self, _: Request) -> Response:
        return json_response(ModelNames(self._names()))

    async def model(self, request: Request) -> Response:
        model, pipeline = self._find(request)
        manifest = pipeline.manifest
        name = f"{manifest.name}.{model.task.name}"
        versions = [
            str(other.manifest.version)
            for other in self._context.models.serving(model.task)
            if other.manifest.name == manifest.name
        ]
        tensors = model.tensors
        described = (
            [_metadata(t) for t in tensors.inputs],
            [_metadata(t) for t in tensors.outputs],
        )
        return json_response(ModelMetadata(name, versions, _PLATFORM, *described))

    async def model_ready(self, request: Request) -> Response:
        model, pipeline = self._find(request)
        check(self._context.state.unready())
        return json_response(ModelReady(f"{pipeline.manifest.name}.{model.task.name}", True))

    async def infer(self, request: Request) -> Response:
        """Answer a request for any model."""
        model, pipeline = self._find(request)
        with self._context.watch.request(request) as watched:
            limits = self._context.limits
            data = await watched.read_body(limits.body.max_bytes)
            length = request.headers.get(JSON_LENGTH)
            body = await run_anywhere(len(data), _parse, data, length, limits)
            return await model.endpoint.answer_body(request, body, len(data), watched, pipeline)


def _metadata(info: TensorInfo) -> TensorMetadata:
    return TensorMetadata(info.name, info.datatype, list(info.shape))


def _parse(data: bytes, length: str | None, limits: ApiLimits) -> InferBody:
    """Return a body whose tensors all have data.

    Args:
        data: the JSON, and the bytes of tensors after it.
        length: the value of `JSON_LENGTH`.
        limits: the limits of the body, and of its texts.

    Raises:
        RequestError: the body is malformed or too large, or the bytes are not those that the
            tensors state.
    """
    head, binary = split(data, length)
    body = parse(InferBody, head, limits.body)
    tensors, start = [], 0
    for tensor in body.inputs:
        size = (tensor.parameters or {}).get("binary_data_size")
        if size is not None:
            at = _place(tensor)
            if not isinstance(size, int):
                raise InvalidRequest("has a binary_data_size that is no whole number", at)
            if size < 0 or start + size > len(binary):
                raise InvalidRequest(
                    f"has the binary_data_size {size}; {len(binary) - start} bytes are left", at
                )
            if tensor.data is not None:
                raise InvalidRequest("has both data and binary_data_size", at)
            texts = read_texts(binary[start : start + size], at, limits.max_request_texts)
            tensor = tensor.model_copy(update={"data": texts})
            start += size
        tensors.append(tensor)
    if start != len(binary):
        raise InvalidRequest(f"{len(binary) - start} bytes after the JSON belong to no tensor")
    return body.model_copy(update={"inputs": tensors})


def routes(context: ProtocolContext) -> Sequence[Route]:
    """Return the routes of the protocol."""
    server = _Server(context)

    def get(path: str, handler: Handler, summary: str, result: Any, *errors: int) -> Route:
        return Route(
            "GET", path, handler, RouteDoc(summary, _TAG, result, ErrorBody, errors=errors)
        )

    infer = RouteDoc(
        summary="The results of one task of one model, as tensors",
        tag=_TAG,
        result=InferAnswer,
        error_body=ErrorBody,
        body=InferBody,
        examples={"Two texts": _EXAMPLE},
        media_types=(RAW,),
        headers={
            **TIMING_HEADERS,
            JSON_LENGTH: ("integer", "bytes of the JSON before the tensors"),
        },
        errors=tuple(sorted(set(map(without_422, ERROR_STATUSES)))),
    )
    found = [
        get("/v2", server.server, "The server and its extensions", ServerMetadata),
        get("/v2/health/live", server.live, "Liveness: 503 once an engine is dead", Live, 503),
        get("/v2/health/ready", server.ready, "Readiness: 503 while draining or dead", Ready, 503),
        get("/v2/models", server.models, "The names of the models", ModelNames),
    ]
    every_model = gate_models(context.models.pipelines)
    for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        found += [
            get(path, server.model, "The tensors of a model", ModelMetadata, 404),
            get(
                f"{path}/ready",
                server.model_ready,
                "Readiness of a model",
                ModelReady,
                404,
                503,
            ),
            Route("POST", f"{path}/infer", server.infer, infer, every_model),
        ]
    return found


_EXAMPLE: Final = {
    "inputs": [
        {
            "name": "text",
            "shape": [2],
            "datatype": "BYTES",
            "data": ["What is deep learning?", "A cat sat."],
        }
    ]
}

PROTOCOL: Final = WireProtocol("open-inference", ("/v2",), routes, write_error)
