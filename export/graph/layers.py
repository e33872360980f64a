"""The layers that the trunk and the heads share, in fp32."""

from torch import nn

from cloze.export.graph.builder import GraphBuilder


def linear(g: GraphBuilder, x: str, name: str, layer: nn.Linear) -> str:
    """Write ``x @ W^T + b``: [..., in] -> [..., out]."""
    product = g.op("MatMul", [x, g.weight(f"{name}.weight", layer.weight.t())])
    return g.op("Add", [product, g.weight(f"{name}.bias", layer.bias)])


def layer_norm(g: GraphBuilder, x: str, name: str, layer: nn.LayerNorm) -> str:
    """Write LayerNorm over the last axis."""
    scale, shift = g.weight(f"{name}.weight", layer.weight), g.weight(f"{name}.bias", layer.bias)
    return g.op("LayerNormalization", [x, scale, shift], axis=-1, epsilon=layer.eps)
