"""The pieces that trunk and heads are both made of."""

from torch import nn

from export.graph.builder import FUSED, GraphBuilder


def dense(g: GraphBuilder, x: str, name: str, linear: nn.Linear) -> str:
    """``x @ W^T + b`` in fp32: [..., in] -> [..., out]."""
    product = g.op("MatMul", [x, g.weight(f"{name}.weight", linear.weight.t())])
    return g.op("Add", [product, g.weight(f"{name}.bias", linear.bias)])


def activated(g: GraphBuilder, product: str, bias: str, activation: str) -> str:
    """``activation(product + bias)``, fused where there is an operator for it."""
    match activation:
        case "gelu":
            return g.op("BiasGelu", [product, bias], domain=FUSED)
        case "gelu_new" | "gelu_pytorch_tanh":
            return g.op("FastGelu", [product, bias], domain=FUSED)
        case "relu":
            return g.op("Relu", [g.op("Add", [product, bias])])
    raise AssertionError(f"the loader let the activation {activation!r} through")


def norm(g: GraphBuilder, x: str, name: str, layer: nn.LayerNorm) -> str:
    """LayerNorm over the last axis."""
    scale, shift = g.weight(f"{name}.weight", layer.weight), g.weight(f"{name}.bias", layer.bias)
    return g.op("LayerNormalization", [x, scale, shift], axis=-1, epsilon=layer.eps)
