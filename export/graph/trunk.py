"""The encoder, the same for every layout and every arithmetic.

Biases of attention are folded exactly. With q' = q + b_q, k' = k + b_k, v' = v + b_v:

- q' . k'_j = q' . k_j + q' . b_k, and the last term is the same for every j: it cancels in the softmax. K needs none.
- The softmax weights of a row sum to 1, so b_v reaches the output as W_o b_v: it moves into the output's bias.
"""

from torch import nn

from export.graph.builder import GraphBuilder
from export.graph.layers import activated
from export.graph.layouts import BatchLayout
from export.graph.products import LinearInput, LinearOps
from export.models.config import EncoderConfig
from export.models.encoder import Encoder, Layer


def trunk(
    g: GraphBuilder,
    layout: BatchLayout,
    linear_ops: LinearOps,
    encoder: Encoder,
    config: EncoderConfig,
) -> str:
    """Write inputs, embeddings and layers; returns the name of the hidden states, in the layout's shape."""
    hidden = layout.embed(g, linear_ops, encoder.embeddings)
    for number, layer in enumerate(encoder.layers):
        assert isinstance(layer, Layer)
        hidden = _layer(g, layout, linear_ops, hidden, f"layers.{number}", layer, config.activation)
    return hidden


def _layer(
    g: GraphBuilder,
    layout: BatchLayout,
    linear_ops: LinearOps,
    x: str,
    name: str,
    layer: Layer,
    activation: str,
) -> str:
    attention = layer.attention

    def product(x: LinearInput, part: str, linear: nn.Linear) -> str:
        return linear_ops.product(g, x, f"{name}.{part}", linear)

    entering = linear_ops.operand(g, x, f"{name}.query")
    query = product(entering, "query", attention.query)
    query = g.op("Add", [query, linear_ops.vector(g, f"{name}.query.bias", attention.query.bias)])
    key, value = (
        product(entering, "key", attention.key),
        product(entering, "value", attention.value),
    )
    context = layout.attend(g, query, key, value, attention.heads)
    output = product(linear_ops.operand(g, context, f"{name}.output"), "output", attention.output)
    output_bias = attention.output.bias + attention.output.weight @ attention.value.bias
    x = layout.residual_norm(
        g, linear_ops, output, x, f"{name}.attention_norm", output_bias, layer.attention_norm
    )

    up = product(linear_ops.operand(g, x, f"{name}.up"), "up", layer.up)
    up = activated(g, up, linear_ops.vector(g, f"{name}.up.bias", layer.up.bias), activation)
    down = product(linear_ops.operand(g, up, f"{name}.down"), "down", layer.down)
    return layout.residual_norm(
        g, linear_ops, down, x, f"{name}.output_norm", layer.down.bias, layer.output_norm
    )
