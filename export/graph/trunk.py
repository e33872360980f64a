"""The encoder, the same for every layout and every arithmetic.

Biases of attention are folded exactly. With q' = q + b_q, k' = k + b_k, v' = v + b_v:

- q' . k'_j = q' . k_j + q' . b_k, and the last term is the same for every j: it cancels in the softmax. K needs none.
- The softmax weights of a row sum to 1, so b_v reaches the output as W_o b_v: it moves into the output's bias.
"""

from torch import nn

from export.graph.builder import GraphBuilder
from export.graph.layers import activated
from export.graph.layouts import Tokens
from export.graph.products import Operand, Products
from export.models import Model
from export.models.encoder import Layer


def trunk(g: GraphBuilder, tokens: Tokens, products: Products, model: Model) -> str:
    """Write inputs, embeddings and layers; returns the name of the hidden states, in the layout's shape."""
    hidden = tokens.embed(g, products, model.encoder.embeddings)
    for number, layer in enumerate(model.encoder.layers):
        assert isinstance(layer, Layer)
        hidden = _layer(g, tokens, products, hidden, f"layers.{number}", layer, model.config.activation)
    return hidden


def _layer(g: GraphBuilder, tokens: Tokens, products: Products, x: str, name: str, layer: Layer, activation: str) -> str:
    attention = layer.attention

    def product(x: Operand, part: str, linear: nn.Linear) -> str:
        return products.product(g, x, f"{name}.{part}", linear)

    entering = products.operand(g, x, f"{name}.query")
    query = product(entering, "query", attention.query)
    query = g.op("Add", [query, products.vector(g, f"{name}.query.bias", attention.query.bias)])
    key, value = product(entering, "key", attention.key), product(entering, "value", attention.value)
    context = tokens.attend(g, query, key, value, attention.heads)
    output = product(products.operand(g, context, f"{name}.output"), "output", attention.output)
    output_bias = attention.output.bias + attention.output.weight @ attention.value.bias
    x = tokens.residual_norm(g, products, output, x, f"{name}.attention_norm", output_bias, layer.attention_norm)

    up = product(products.operand(g, x, f"{name}.up"), "up", layer.up)
    up = activated(g, up, products.vector(g, f"{name}.up.bias", layer.up.bias), activation)
    down = product(products.operand(g, up, f"{name}.down"), "down", layer.down)
    return tokens.residual_norm(g, products, down, x, f"{name}.output_norm", layer.down.bias, layer.output_norm)
