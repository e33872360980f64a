"""The Open Inference Protocol, version 2, over REST: ``/v2``, as KServe and Triton's clients speak.

Each task of each served model is a model of the protocol, ``<bundle>.<task>``. Texts are tensors of
the datatype BYTES, in JSON or in the binary extension. `tensors` has the names of the tensors.

Source: https://github.com/kserve/open-inference-protocol, ``specification/protocol``, and the
binary tensor data extension of Triton.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote

from pydantic import BaseModel, BeforeValidator, Field, create_model
from starlette.requests import Request
from starlette.responses import Response

from cloze.model_store.installation import DISTRIBUTION
from cloze.service import errors
from cloze.service.core import ServedRequest
from cloze.service.http.body import BytesResponse, load, validate
from cloze.service.http.routes import RAW, RECORD, Route, RouteDoc
from cloze.service.models.pipeline import Models, Pipeline
from cloze.service.protocols import tensors
from cloze.service.protocols.protocol import (
    TIMING_HEADERS,
    LenientModel,
    ProtocolContext,
    TaskRoute,
    WireProtocol,
    answer_probe,
    answer_task,
    gate_models,
    get_route,
    json_response,
)
from cloze.service.tasks import Task
from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.wire import CountOrZero, check_range

_TAG: Final = "Open Inference Protocol"


def _null_is_default(model: Any) -> BeforeValidator:
    """Return a validator of the model, by which null is an object without fields."""
    return BeforeValidator(
        lambda value: {} if value is None else value, json_schema_input_type=model | None
    )


class TensorParameters(LenientModel):
    """The parameters of a tensor: the first two of an input, the others of an output."""

    binary_data_size: int | None = Field(None, description="bytes of the tensor after the JSON")
    content_type: str | None = Field(None, description="the codec of the texts, as in MLServer")
    binary_data: bool | None = Field(None, description="whether the tensor follows the JSON")
    classification: int | None = Field(None, ge=1, description="number of labels, best first")


class InferInput(LenientModel):
    """An input tensor; ``data`` is absent if the tensor follows the JSON as bytes."""

    name: str
    shape: list[int] = Field(max_length=8)
    datatype: Literal["BYTES"]
    parameters: Annotated[TensorParameters, _null_is_default(TensorParameters)] = TensorParameters()
    data: list[str | list[str]] | None = None


class InferOutput(LenientModel):
    """An output tensor that a client asks for."""

    name: str
    parameters: Annotated[TensorParameters, _null_is_default(TensorParameters)] = TensorParameters()


class InferParameters(LenientModel):
    """The parameters of a request, besides those of the task."""

    binary_data_output: bool | None = Field(None, description="the default of binary_data")
    timeout: CountOrZero | None = Field(None, description="microseconds to wait at most")


class InferBody(LenientModel):
    """The body of ``POST /v2/models/{model}/infer``."""

    inputs: list[InferInput]
    id: str | None = Field(None, max_length=1024, description="returned with the answer")
    model_name: str | None = Field(None, description="ignored: the path has the name")
    outputs: list[InferOutput] | None = Field(None, description="the default is all")
    parameters: Annotated[InferParameters, _null_is_default(InferParameters)] = InferParameters()


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
_ABOUT: Any = {"name": str, "versions": list[str], "platform": str}
_ABOUT |= dict.fromkeys(("inputs", "outputs"), list[tensors.TensorMetadata])
_METADATA = _answer_type("ModelMetadata", _MODEL, **_ABOUT)


class _TaskModel(TaskRoute):
    """One task, as the models of the protocol that do it."""

    def __init__(self, task: Task, context: ProtocolContext) -> None:
        self.task, self.tensors = task, tensors.TaskTensors(task)
        parameters: Any = create_model("Parameters", __base__=(task.parameters, InferParameters))
        typed: Any = (Annotated[parameters, _null_is_default(parameters)], parameters())
        self.body = create_model("InferBody", __base__=InferBody, parameters=typed)
        super().__init__(context)

    def in_body(self, at: errors.Location, _: Any) -> errors.Location:
        """Return the element of a tensor: ``context[3]`` for ``inputs[3].context``."""
        if at[:1] != INPUTS:
            return at
        fields = [part for part in at[1:] if isinstance(part, str)]
        numbers = [part for part in at[1:] if isinstance(part, int)]
        return errors.Location(((fields or [self.tensors.inputs[0].name])[0], *numbers))

    def parse(self, request: ServedRequest, data: bytes) -> tuple[TaskRoute, Any]:
        """Return the route, and a body with decoded texts and the names of its ignored parts."""
        head, rest = tensors.split(data, request.first.get(tensors.JSON_LENGTH.encode()))
        limits, most = self.context.body_limits, self.context.max_request_texts
        body: Any = validate(self.body, load(head, limits))
        inputs = []
        for tensor in body.inputs:
            at = errors.Location((errors.quoted(tensor.name)[1:-1],))  # in ASCII
            if (size := tensor.parameters.binary_data_size) is not None:
                if not 0 <= size <= len(rest):
                    problem = f"has the binary_data_size {size}; {len(rest)} bytes are left"
                    raise errors.InvalidRequest(problem, at)
                if tensor.data is not None:
                    raise errors.InvalidRequest("has both data and binary_data_size", at)
                texts, rest = tensors.read_texts(rest[:size], at, most), rest[size:]
                tensor = tensor.model_copy(update={"data": texts})
            kind, read = tensor.parameters.content_type, partial(load, limits=limits)
            texts = tensors.decode_content(_texts(tensor, at), kind, at, read)
            inputs.append(tensor.model_copy(update={"data": texts, "shape": [len(texts)]}))
        if rest:
            raise errors.InvalidRequest(f"{len(rest)} bytes after the JSON belong to no tensor")
        ignored = dict.fromkeys(_ignored(body, request.path))
        return self, body.model_copy(update={"inputs": inputs} | ignored)

    def to_call(self, request: ServedRequest, body: InferBody) -> tuple[Any, Any]:
        known = ", ".join(tensor.name for tensor in self.tensors.outputs)
        for output in body.outputs or ():
            problem, is_score = "", self.task.labels is not None and output.name == "score"
            if output.name not in known.split(", "):
                problem = f"names {errors.quoted(output.name)}; {self.task.name} has {known}"
            elif output.parameters.classification and not is_score:
                problem = f"asks for classification; {output.name} is no score of labels"
            if problem:
                raise errors.InvalidRequest(problem, errors.Location(("outputs",)))
        texts: dict[str, list[Any]] = {}
        for tensor in body.inputs:
            if tensor.name in texts:
                raise errors.InvalidRequest(f"has {errors.quoted(tensor.name)} twice", INPUTS)
            texts[tensor.name] = tensor.data or []
        if getattr(body.parameters, "return_offsets", None):
            problem = "asks for offsets, which no tensor has; POST /embed_all returns them"
            raise errors.InvalidRequest(problem, errors.Location(("parameters", "return_offsets")))
        if microseconds := body.parameters.timeout:
            check_range(microseconds, 0, 2**63, "timeout")
            if (limit_s := microseconds / 1e6) < request.limit_s:
                request.stated_s = request.limit_s = limit_s
                request.deadline = self.context.limits.clock.monotonic() + limit_s
        return self.tensors.to_inputs(texts), body.parameters

    def respond(self, request: ServedRequest, body: InferBody, value: Any) -> BytesResponse:
        model, _, number = request.model.rpartition("@")
        default = body.parameters.binary_data_output
        asked = {output.name: output.parameters for output in body.outputs or ()}
        outputs = self.tensors.to_outputs(value, asked, body.inputs[0].shape[0])
        datatypes = {tensor.name: tensor.datatype for tensor in self.tensors.outputs}
        rows, parts = [], []
        for name, data in outputs.items():
            parameters = asked.get(name, TensorParameters())
            shape = [len(data)] if isinstance(data, list) else list(data.shape)
            row: dict[str, Any] = {"name": name, "shape": shape, "datatype": datatypes[name]}
            if (most := parameters.classification) and self.task.labels is not None:
                manifest = self.context.models.named(request.model).manifest
                data = tensors.classes(value, self.task.labels(manifest, body.parameters), most)
                row |= {"shape": [len(value), len(data) // len(value)], "datatype": "BYTES"}
            if default if parameters.binary_data is None else parameters.binary_data:
                parts.append(tensors.write_tensor(data))
                row["parameters"] = {"binary_data_size": len(parts[-1])}
            else:
                row["data"] = data if isinstance(data, list) else data.reshape(-1)
            rows.append(row)
        answer: dict[str, Any] = {} if body.id is None else {"id": body.id}
        answer |= {"model_name": f"{model}.{self.task.name}", "model_version": number}
        head = json_response(answer | {"outputs": rows}, in_parts=request.is_large)
        if not parts:
            return head
        length = (tensors.JSON_LENGTH.encode(), b"%d" % len(head.body))
        return BytesResponse(b"".join((head.body, *parts)), RAW.encode(), length)


def _ignored(body: InferBody, path: str) -> Iterator[str]:
    """Yield the names of what a body has and nobody reads, besides its own fields."""
    if body.model_name is not None and f"/{body.model_name}/" not in path:
        yield "model_name, unlike the path's"
    for place, parts, read in (
        ("inputs", body.inputs, {"binary_data_size", "content_type"}),
        ("outputs", body.outputs or (), {"binary_data", "classification"}),
    ):
        for tensor in parts:
            yield from (f"{place}.{name}" for name in tensor.model_extra or ())
            for name in sorted(tensor.parameters.model_fields_set - read):
                if name.startswith("shared_memory_"):
                    problem = f"has {name}, but there is no shared memory; send the data"
                    raise errors.InvalidRequest(problem, errors.Location((place, "parameters")))
                yield f"{place}.parameters.{name}"


def _texts(tensor: InferInput, at: errors.Location) -> list[str]:
    """Return the elements of an input tensor [n] or [n, 1]."""
    if not tensor.shape or tensor.shape[1:] not in ([], [1]):
        problem = f"has the shape {str(tensor.shape)[:80]}; send [n] or [n, 1]"
        raise errors.InvalidRequest(problem, at)
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

    @cached_property
    def _tasks(self) -> dict[str, _TaskModel]:  # at the first request, since it takes 15 ms
        return {name: _TaskModel(task, self._context) for name, task in self._context.tasks.items()}

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
            problem = f"no model {errors.quoted(name)} is served: {error}"
            raise errors.UnknownModel(problem) from None
        return model, chosen

    async def server(self, _: Request) -> Response:
        about = {"name": "cloze", "version": version(DISTRIBUTION)}
        return json_response(about | {"extensions": ["binary_tensor_data", "classification"]})

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


def _routes(context: ProtocolContext) -> Sequence[Route]:
    server, state = _Server(context), context.state
    get = partial(get_route, tag=_TAG)
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
    body=InferBody,
    examples={"One text": {"inputs": [_TEXT]}},
    media_types=(RAW,),
    headers={**TIMING_HEADERS, tensors.JSON_LENGTH: ("integer", "bytes of the JSON")},
)

PROTOCOL: Final = WireProtocol(_routes, ("/v2",), OpenInferenceErrorBody)
