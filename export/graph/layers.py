"""The layers that the trunk and the heads share, in fp32."""

from torch import nn

from cloze.export.graph.builder import FUSED, GraphBuilder


def linear(g: GraphBuilder, x: str, name: str, layer: nn.Linear) -> str:
    """Write ``x @ W^T + b``: [..., in] -> [..., out]."""
    product = g.op("MatMul", [x, g.weight(f"{name}.weight", layer.weight.t())])
    return g.op("Add", [product, g.weight(f"{name}.bias", layer.bias)])


def bias_activation(g: GraphBuilder, product: str, bias: str, activation: str) -> str:
    """Write ``activation(product + bias)``, fused if an operator exists."""
    match activation:
        case "gelu":
            return g.op("BiasGelu", [product, bias], domain=FUSED)
        case "gelu_new" | "gelu_pytorch_tanh":
            return g.op("FastGelu", [product, bias], domain=FUSED)
        case "relu":
            return g.op("Relu", [g.op("Add", [product, bias])])
    raise AssertionError(f"the loader accepted the unknown activation {activation!r}")


def least_activation(activation: str) -> float:
    """Return a lower bound of an activation: the minimum of GELU, and of its approximation by tanh.

    Both minima are between -0.1701 and -0.1699.
    """
    return 0.0 if activation == "relu" else -0.171


def layer_norm(g: GraphBuilder, x: str, name: str, layer: nn.LayerNorm) -> str:
    """Write LayerNorm over the last axis."""
    scale, shift = g.weight(f"{name}.weight", layer.weight), g.weight(f"{name}.bias", layer.bias)
    return g.op("LayerNormalization", [x, scale, shift], axis=-1, epsilon=layer.eps)
