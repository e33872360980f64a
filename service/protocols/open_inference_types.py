"""The bodies and responses of the Open Inference Protocol."""

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from cloze.service.tasks.task import WireModel


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
class TensorMetadata:
    """The name and type of a tensor; -1 in the shape is any size."""

    name: str
    datatype: str
    shape: list[int]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The response to ``GET /v2/models/{model}``."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """The response to ``GET /v2``."""

    name: str
    version: str
    extensions: list[str]


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The response to ``GET /v2/models``."""

    models: list[str]


@dataclass(frozen=True, slots=True)
class Live:
    """The response to ``GET /v2/health/live``."""

    live: Literal[True]


@dataclass(frozen=True, slots=True)
class Ready:
    """The response to ``GET /v2/health/ready``."""

    ready: Literal[True]


@dataclass(frozen=True, slots=True)
class ModelReady:
    """The response to ``GET /v2/models/{model}/ready``."""

    name: str
    ready: Literal[True]


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """An error in the protocol's shape."""

    error: str
