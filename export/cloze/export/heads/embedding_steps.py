"""sentence-transformers' modules after the pooling, torch and graph."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloze.export.graph.builder import GraphBuilder, layer_norm, linear

_SMALLEST_LENGTH = 1e-12
"""A shorter vector is divided by this length, as by `F.normalize`."""


def _operator(name: str, **attributes: Any) -> Callable[[GraphBuilder, str], str]:
    return lambda g, x: g.op(name, [x], **attributes)


def _clip(least: float, most: float) -> Callable[[GraphBuilder, str], str]:
    def write(g: GraphBuilder, x: str) -> str:
        bounds = [g.weight(f"bound_{n}", np.array(n, np.float32)) for n in (least, most)]
        return g.op("Clip", [x, *bounds])

    return write


DENSE_ACTIVATIONS: Final[Mapping[str, Callable[[GraphBuilder, str], str]]] = {
    "Identity": lambda _, x: x,
    "Tanh": _operator("Tanh"),
    "ReLU": _operator("Relu"),
    "GELU": _operator("Gelu"),
    "SiLU": lambda g, x: g.op("Mul", [x, g.op("Sigmoid", [x])]),
    "Sigmoid": _operator("Sigmoid"),
    "ELU": _operator("Elu"),
    "SELU": _operator("Selu"),
    "LeakyReLU": _operator("LeakyRelu", alpha=0.01),
    "Softplus": _operator("Softplus"),
    "Softsign": _operator("Softsign"),
    "Mish": _operator("Mish"),
    "Hardswish": _operator("HardSwish"),
    "CELU": _operator("Celu"),
    "ReLU6": _clip(0.0, 6.0),
    "Hardtanh": _clip(-1.0, 1.0),
    "Hardsigmoid": _operator("HardSigmoid", alpha=1 / 6, beta=0.5),
    "Hardshrink": _operator("Shrink", lambd=0.5, bias=0.0),
    "Softshrink": _operator("Shrink", lambd=0.5, bias=0.5),
    "Tanhshrink": lambda g, x: g.op("Sub", [x, g.op("Tanh", [x])]),
    "LogSigmoid": lambda g, x: g.op("Neg", [g.op("Softplus", [g.op("Neg", [x])])]),
    "Softmax": _operator("Softmax", axis=1),
    "LogSoftmax": _operator("LogSoftmax", axis=1),
    "Softmin": lambda g, x: g.op("Softmax", [g.op("Neg", [x])], axis=1),
}
"""Writes each activation of ``torch.nn`` without weights or arguments, by the name of its class.

RReLU, which is random in training, and GLU, which halves the vector, are not among them.
"""

_OF_ALL_NUMBERS: Final = frozenset({"Softmax", "LogSoftmax", "Softmin"})
"""The activations whose numbers depend on all numbers of the vector."""


class Step(nn.Module, ABC):
    """A module after the pooling, which maps [E, D] to [E, D']."""

    @abstractmethod
    def write(self, g: GraphBuilder, x: str, name: str) -> str:
        """Write the module."""

    @property
    def dimensions(self) -> int | None:
        """D'; None: as many as before."""
        return None


class Projection(Step):
    """A dense layer (sentence-transformers' ``Dense``), with an optional residual connection."""

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
        dimension = {"dim": 1} if activation in _OF_ALL_NUMBERS else {}
        self.function: nn.Module = getattr(nn, activation)(**dimension)
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
        projected = DENSE_ACTIVATIONS[self.activation](g, linear(g, x, name, self.linear))
        if not self.adds_input:
            return projected
        if self.residual is not None:
            x = g.op("MatMul", [x, g.weight(f"{name}.residual", self.residual.weight.t())])
        return g.op("Add", [projected, x])


class Norm(Step):
    """sentence-transformers' ``LayerNorm``."""

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


class UnitLength(Step):
    """sentence-transformers' ``Normalize`` before another module."""

    def forward(self, pooled: Tensor) -> Tensor:
        """Return ``pooled`` [E, D] with rows of length 1."""
        return F.normalize(pooled, dim=1, eps=_SMALLEST_LENGTH)

    def write(self, g: GraphBuilder, x: str, name: str) -> str:  # noqa: ARG002
        """See `Step`."""
        axis = g.weight("axis_1", np.array([1], np.int64))
        length = g.op("ReduceL2", [x, axis], keepdims=1)
        least = g.weight("smallest_length", np.array(_SMALLEST_LENGTH, np.float32))
        return g.op("Div", [x, g.op("Max", [length, least])])
