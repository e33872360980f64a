"""Writes the encoder, the same for every layout and every precision.

Biases of attention are folded exactly. With q' = q + b_q, k' = k + b_k, v' = v + b_v:

- q' . k'_j = q' . k_j + q' . b_k, and the last term is the same for every j. The term cancels in
  the softmax, so keys need no bias.
- The softmax weights of a row sum to 1, so b_v reaches the output as W_o b_v. That vector is added
  to the output's bias.
"""

from dataclasses import dataclass

from torch import nn

from cloze.export.graph.builder import GraphBuilder
from cloze.export.graph.layers import bias_activation, least_activation
from cloze.export.graph.layouts import BatchLayout, ResidualNorm
from cloze.export.graph.linear_ops import LinearInput, LinearOps
from cloze.export.models import Model
from cloze.export.models.encoder import Layer


def write_trunk(
    g: GraphBuilder, layout: BatchLayout, linear_ops: LinearOps, model: Model
) -> list[str]:
    """Write the trunk's inputs, embeddings and layers.

    Returns:
        The names of the embeddings and of each layer's output, in the layout's shape.
    """
    states = [layout.embed(g, linear_ops, model.encoder.embeddings)]
    for number, layer in enumerate(model.encoder.layers):
        assert isinstance(layer, Layer)
        writer = _LayerWriter(g, layout, linear_ops, f"layers.{number}", layer)
        attended = writer.self_attention(states[-1])
        states.append(writer.feed_forward(attended, model.config.activation))
    return states


@dataclass(frozen=True, slots=True)
class _LayerWriter:
    """Writes one transformer layer.

    Attributes:
        g: the graph.
        layout: writes attention and norms.
        linear_ops: writes products.
        name: the layer's name in the graph.
        layer: the layer's weights.
    """

    g: GraphBuilder
    layout: BatchLayout
    linear_ops: LinearOps
    name: str
    layer: Layer

    def self_attention(self, x: str) -> str:
        """Write the attention block: hidden states -> hidden states."""
        attention = self.layer.attention
        entering = self._prepare(x, "query")
        query = self._matmul(entering, "query", attention.query)
        query = self.g.op("Add", [query, self._bias("query", attention.query)])
        key = self._matmul(entering, "key", attention.key)
        value = self._matmul(entering, "value", attention.value)
        context = self.layout.attend(self.g, query, key, value, attention.heads)
        output = self._matmul(self._prepare(context, "output"), "output", attention.output)
        bias = attention.output.bias + attention.output.weight @ attention.value.bias
        norm = ResidualNorm(f"{self.name}.attention_norm", bias, self.layer.attention_norm)
        return self.layout.residual_norm(self.g, self.linear_ops, output, x, norm)

    def feed_forward(self, x: str, activation: str) -> str:
        """Write the feed-forward block: hidden states -> hidden states."""
        up = self._matmul(self._prepare(x, "up"), "up", self.layer.up)
        up = bias_activation(self.g, up, self._bias("up", self.layer.up), activation)
        entering = self._prepare(up, "down", least_activation(activation))
        down = self._matmul(entering, "down", self.layer.down)
        name = f"{self.name}.output_norm"
        norm = ResidualNorm(name, self.layer.down.bias, self.layer.output_norm)
        return self.layout.residual_norm(self.g, self.linear_ops, down, x, norm)

    def _prepare(self, x: str, part: str, least: float | None = None) -> LinearInput:
        return self.linear_ops.prepare_input(self.g, x, f"{self.name}.{part}", least)

    def _matmul(self, x: LinearInput, part: str, linear: nn.Linear) -> str:
        return self.linear_ops.matmul(self.g, x, f"{self.name}.{part}", linear)

    def _bias(self, part: str, linear: nn.Linear) -> str:
        return self.linear_ops.vector(self.g, f"{self.name}.{part}.bias", linear.bias)
