"""The pieces that trunk and heads are both made of."""

from torch import Tensor, nn

from export.graph.builder import FUSED, GraphBuilder


def dense(g: GraphBuilder, x: str, name: str, linear: nn.Linear) -> str:
    """``x @ W^T + b`` in fp32: [..., in] -> [..., out]."""
    product = g.op("MatMul", [x, g.weight(f"{name}.weight", linear.weight.t())])
    return g.op("Add", [product, g.weight(f"{name}.bias", linear.bias)])


def activated(g: GraphBuilder, product: str, name: str, linear: nn.Linear, activation: str) -> str:
    """``activation(product + b)``, fused where there is an operator for it."""
    bias = g.weight(f"{name}.bias", linear.bias)
    match activation:
        case "gelu":
            return g.op("BiasGelu", [product, bias], domain=FUSED)
        case "gelu_new" | "gelu_pytorch_tanh":
            return g.op("FastGelu", [product, bias], domain=FUSED)
        case "relu":
            return g.op("Relu", [g.op("Add", [product, bias])])
    raise AssertionError(f"the loader let the activation {activation!r} through")


def residual_norm(g: GraphBuilder, x: str, skip: str, name: str, bias: Tensor, layer: nn.LayerNorm) -> str:
    """``LayerNorm(x + skip + bias)``.

    Not the fused `SkipLayerNormalization`: on a CPU that is a scalar loop in onnxruntime 1.31, 974 us where these two take 168
    (512 x 384, one thread of a Zen 4). `Sum` and not two `Add`, which the runtime would fuse into it.
    """
    total = g.op("Sum", [x, skip, g.weight(f"{name}.skip.bias", bias)])
    return norm(g, total, name, layer)


def norm(g: GraphBuilder, x: str, name: str, layer: nn.LayerNorm) -> str:
    """LayerNorm over the last axis."""
    scale, shift = g.weight(f"{name}.weight", layer.weight), g.weight(f"{name}.bias", layer.bias)
    return g.op("LayerNormalization", [x, scale, shift], axis=-1, epsilon=layer.eps)
