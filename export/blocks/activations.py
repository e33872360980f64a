"""The supported activations, by their names in ``config.json``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from cloze.export.graph.builder import FUSED, GraphBuilder


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function.

    Attributes:
        fused: whether the operator is one of onnxruntime's that adds a bias first.
        least: a lower bound of the function; None: the function has none.
    """

    forward: Callable[[Tensor], Tensor]
    operator: str
    fused: bool = False
    least: float | None = None

    def write(self, g: GraphBuilder, product: str, bias: str) -> str:
        """Write ``activation(product + bias)``."""
        if self.fused:
            return g.op(self.operator, [product, bias], domain=FUSED)
        return g.op(self.operator, [g.op("Add", [product, bias])])


_GELU_LEAST = -0.171
"""A lower bound of GELU and of its approximation: both minima are from -0.1701 to -0.1699."""

_TANH_GELU = Activation(
    partial(F.gelu, approximate="tanh"), "FastGelu", fused=True, least=_GELU_LEAST
)

ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "gelu": Activation(F.gelu, "BiasGelu", fused=True, least=_GELU_LEAST),
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "relu": Activation(F.relu, "Relu", least=0.0),
    "tanh": Activation(torch.tanh, "Tanh", least=-1.0),
}
"""``gelu`` is x * Phi(x), computed with the error function.

``gelu_new`` is its tanh approximation (Hendrycks & Gimpel 2016).
"""
