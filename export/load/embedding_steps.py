"""sentence-transformers' modules after the pooling: torch, graph, and how they are read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloze.export.errors import ExportError
from cloze.export.graph.builder import GraphBuilder, layer_norm, linear
from cloze.export.load.source import read_tensors, weight_files

_SMALLEST_LENGTH = 1e-12
"""A shorter vector is divided by this length, as by `F.normalize`."""


@dataclass(frozen=True, slots=True)
class _DenseActivation:
    """An activation of sentence-transformers' ``Dense``: torch's class, and the ONNX operator.

    An operator that ONNX lacks has torch's name, and is written of several.
    """

    module: Callable[[], nn.Module]
    operator: str
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def write(self, g: GraphBuilder, x: str) -> str:
        match self.operator:
            case "Identity":
                return x
            case "SiLU":
                return g.op("Mul", [x, g.op("Sigmoid", [x])])
            case "LogSigmoid":
                return g.op("Neg", [g.op("Softplus", [g.op("Neg", [x])])])
            case "Tanhshrink":
                return g.op("Sub", [x, g.op("Tanh", [x])])
            case "Softmin":
                return g.op("Softmax", [g.op("Neg", [x])], axis=1)
            case "Hardtanh":
                bounds = [
                    g.weight(f"bound_{value}", np.array(value, np.float32))
                    for value in self.attributes.values()
                ]
                return g.op("Clip", [x, *bounds])
        return g.op(self.operator, [x], **self.attributes)


_DENSE_ACTIVATIONS = {
    "Identity": _DenseActivation(nn.Identity, "Identity"),
    "Tanh": _DenseActivation(nn.Tanh, "Tanh"),
    "ReLU": _DenseActivation(nn.ReLU, "Relu"),
    "GELU": _DenseActivation(nn.GELU, "Gelu"),
    "SiLU": _DenseActivation(nn.SiLU, "SiLU"),
    "Sigmoid": _DenseActivation(nn.Sigmoid, "Sigmoid"),
    "ELU": _DenseActivation(nn.ELU, "Elu"),
    "SELU": _DenseActivation(nn.SELU, "Selu"),
    "LeakyReLU": _DenseActivation(nn.LeakyReLU, "LeakyRelu", {"alpha": 0.01}),
    "Softplus": _DenseActivation(nn.Softplus, "Softplus"),
    "Softsign": _DenseActivation(nn.Softsign, "Softsign"),
    "Mish": _DenseActivation(nn.Mish, "Mish"),
    "Hardswish": _DenseActivation(nn.Hardswish, "HardSwish"),
    "CELU": _DenseActivation(nn.CELU, "Celu"),
    "ReLU6": _DenseActivation(nn.ReLU6, "Hardtanh", {"min": 0.0, "max": 6.0}),
    "Hardtanh": _DenseActivation(nn.Hardtanh, "Hardtanh", {"min": -1.0, "max": 1.0}),
    "Hardsigmoid": _DenseActivation(nn.Hardsigmoid, "HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}),
    "Hardshrink": _DenseActivation(nn.Hardshrink, "Shrink", {"lambd": 0.5, "bias": 0.0}),
    "Softshrink": _DenseActivation(nn.Softshrink, "Shrink", {"lambd": 0.5, "bias": 0.5}),
    "Tanhshrink": _DenseActivation(nn.Tanhshrink, "Tanhshrink"),
    "LogSigmoid": _DenseActivation(nn.LogSigmoid, "LogSigmoid"),
    "Softmax": _DenseActivation(partial(nn.Softmax, dim=1), "Softmax", {"axis": 1}),
    "LogSoftmax": _DenseActivation(partial(nn.LogSoftmax, dim=1), "LogSoftmax", {"axis": 1}),
    "Softmin": _DenseActivation(partial(nn.Softmin, dim=1), "Softmin"),
}
"""The activations of ``torch.nn`` without weights or arguments, by the names of their classes.

RReLU, which is random in training, and GLU, which halves the vector, are not among them.
"""


class Step(nn.Module, ABC):
    """A module after the pooling, which maps [E, D] to [E, D'].

    Attributes:
        kind: name of its class in sentence-transformers.
    """

    kind: ClassVar[str]

    @abstractmethod
    def write(self, g: GraphBuilder, x: str, name: str) -> str:
        """Write the module."""

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the settings and the tensors of its folder in a checkpoint."""
        return {}, {}

    @property
    def dimensions(self) -> int | None:
        """D'; None: as many as before."""
        return None


class Projection(Step):
    """A dense layer (sentence-transformers' ``Dense``), with an optional residual connection."""

    kind = "Dense"

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: str = "Identity",
        residual: Tensor | bool = False,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0])
        self.linear.weight.data = weight.float()
        self.linear.bias.data = torch.zeros(weight.shape[0]) if bias is None else bias.float()
        self.activation = activation
        self.function = _DENSE_ACTIVATIONS[activation].module()
        self.adds_input = residual is not False
        self.residual: nn.Linear | None = None
        if isinstance(residual, Tensor):
            self.residual = nn.Linear(residual.shape[1], residual.shape[0], bias=False)
            self.residual.weight.data = residual.float()

    @property
    def dimensions(self) -> int:
        """See `Step`."""
        return self.linear.out_features

    def forward(self, pooled: Tensor) -> Tensor:
        """Project ``pooled`` [E, D] to [E, D']."""
        projected: Tensor = self.function(self.linear(pooled))
        if not self.adds_input:
            return projected
        added: Tensor = pooled if self.residual is None else self.residual(pooled)
        return projected + added

    def write(self, g: GraphBuilder, x: str, name: str) -> str:
        """See `Step`."""
        projected = linear(g, x, name, self.linear)
        projected = _DENSE_ACTIVATIONS[self.activation].write(g, projected)
        if not self.adds_input:
            return projected
        if self.residual is not None:
            x = g.op("MatMul", [x, g.weight(f"{name}.residual", self.residual.weight.t())])
        return g.op("Add", [projected, x])

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Step`."""
        function = type(self.function)
        settings: dict[str, Any] = {
            "in_features": self.linear.in_features,
            "out_features": self.linear.out_features,
            "bias": True,
            "activation_function": f"{function.__module__}.{function.__qualname__}",
        }
        if self.adds_input:
            settings["use_residual"] = True
        tensors: dict[str, Tensor] = {
            "linear.weight": self.linear.weight,
            "linear.bias": self.linear.bias,
        }
        if self.residual is not None:
            tensors["residual.weight"] = self.residual.weight
        return settings, tensors


class Norm(Step):
    """sentence-transformers' ``LayerNorm``."""

    kind = "LayerNorm"

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(len(weight))
        self.norm.weight.data, self.norm.bias.data = weight.float(), bias.float()

    def forward(self, pooled: Tensor) -> Tensor:
        """Normalise ``pooled`` [E, D]."""
        return F.layer_norm(
            pooled, pooled.shape[-1:], self.norm.weight, self.norm.bias, self.norm.eps
        )

    def write(self, g: GraphBuilder, x: str, name: str) -> str:
        """See `Step`."""
        return layer_norm(g, x, name, self.norm)

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """See `Step`."""
        tensors: dict[str, Tensor] = {
            "norm.weight": self.norm.weight,
            "norm.bias": self.norm.bias,
        }
        return {"dimension": len(self.norm.weight)}, tensors


class UnitLength(Step):
    """sentence-transformers' ``Normalize`` before another module."""

    kind = "Normalize"

    def forward(self, pooled: Tensor) -> Tensor:
        """Return ``pooled`` [E, D] with rows of length 1."""
        return F.normalize(pooled, dim=1, eps=_SMALLEST_LENGTH)

    def write(self, g: GraphBuilder, x: str, name: str) -> str:  # noqa: ARG002
        """See `Step`."""
        axis = g.weight("axis_1", np.array([1], np.int64))
        length = g.op("ReduceL2", [x, axis], keepdims=1)
        least = g.weight("smallest_length", np.array(_SMALLEST_LENGTH, np.float32))
        return g.op("Div", [x, g.op("Max", [length, least])])


_OF_TEXTS, _OF_TOKENS = "sentence_embedding", "token_embeddings"


def read_projection(
    folder: Path, settings: dict[str, Any], *, of_tokens: bool = False
) -> Projection:
    """Return the ``Dense`` module of a folder.

    Args:
        folder: the folder of the module.
        settings: its ``config.json``.
        of_tokens: whether the module may be one for the vectors of tokens.

    Raises:
        ExportError: it has an activation, an input or tensors that are not supported.
    """
    names = (_OF_TEXTS, _OF_TOKENS) if of_tokens else (_OF_TEXTS,)
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key) not in (None, *names):
            raise ExportError(
                f"a Dense module with {key} {settings[key]!r} is not supported ({', '.join(names)})"
            )
    tensors = read_tensors(weight_files(folder))
    known = {"linear.weight", "linear.bias", "residual.weight"}
    if not {"linear.weight"} <= tensors.keys() <= known:
        raise ExportError(
            f"the Dense module in {folder.name} is more than one linear layer "
            f"({', '.join(sorted(tensors))})"
        )
    weight = tensors["linear.weight"]
    residual: Tensor | bool = bool(settings.get("use_residual"))
    if residual and weight.shape[0] != weight.shape[1]:
        if "residual.weight" not in tensors:
            raise ExportError(f"the Dense module in {folder.name} lacks residual.weight")
        residual = tensors["residual.weight"]
    return Projection(weight, tensors.get("linear.bias"), _dense_activation(settings), residual)


def _dense_activation(settings: dict[str, Any]) -> str:
    """Return the name of the activation's class, as sentence-transformers reads it.

    Without one it is Tanh, and so is a class outside of torch, which is never loaded.
    """
    path = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = path.rsplit(".", 1)[-1] if path.startswith("torch.") else "Tanh"
    if name not in _DENSE_ACTIVATIONS:
        raise ExportError(
            f"a Dense module with activation {name} is not supported "
            f"({', '.join(_DENSE_ACTIVATIONS)})"
        )
    return name


def read_norm(folder: Path) -> Norm:
    """Return the ``LayerNorm`` module of a folder.

    Raises:
        ExportError: it has other tensors.
    """
    tensors = read_tensors(weight_files(folder))
    if tensors.keys() != {"norm.weight", "norm.bias"}:
        raise ExportError(
            f"the LayerNorm module in {folder.name} has other tensors "
            f"({', '.join(sorted(tensors))})"
        )
    return Norm(tensors["norm.weight"], tensors["norm.bias"])
