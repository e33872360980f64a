"""The encoder in the dense layout: all sequences of one length, hence no padding, no mask, and the flash kernel on a CPU.

Biases of attention are folded exactly. With q' = q + b_q, k' = k + b_k, v' = v + b_v:

- q' . k'_j = q' . k_j + q' . b_k, and the last term is the same for every j: it cancels in the softmax. K needs none.
- The softmax weights of a row sum to 1, so b_v reaches the output as W_o b_v: it moves into the output's bias.
"""

from onnx import TensorProto
from torch import nn

from export.graph.builder import FUSED, GraphBuilder
from export.graph.layers import activated, residual_norm
from export.graph.products import Operand, Products
from export.models import Model
from export.models.encoder import Layer
from model_store import interface


def dense_trunk(g: GraphBuilder, products: Products, model: Model) -> str:
    """Write inputs, embeddings and layers; returns the name of ``hidden [B, S, H]``."""
    embeddings = model.encoder.embeddings
    input_ids = g.input(interface.INPUT_IDS, TensorProto.INT32, ["B", "S"])
    types, type_weight = "", ""
    if embeddings.token_type is not None:
        types = g.input(interface.TOKEN_TYPE_IDS, TensorProto.INT32, ["B", "S"])
        type_weight = g.weight("embeddings.token_type", embeddings.token_type.weight)
    hidden = g.op(
        "EmbedLayerNormalization",
        [
            input_ids,
            types,
            products.table(g, "embeddings.word", embeddings.word.weight),
            g.weight("embeddings.position", embeddings.position.weight),
            type_weight,
            g.weight("embeddings.norm.weight", embeddings.norm.weight),
            g.weight("embeddings.norm.bias", embeddings.norm.bias),
        ],
        domain=FUSED,
        outputs=2,
        epsilon=embeddings.norm.eps,
    )
    for number, layer in enumerate(model.encoder.layers):
        assert isinstance(layer, Layer)
        hidden = _layer(g, products, hidden, f"layers.{number}", layer, model.config.activation)
    return hidden


def _layer(g: GraphBuilder, products: Products, x: str, name: str, layer: Layer, activation: str) -> str:
    attention = layer.attention

    def product(x: Operand, part: str, linear: nn.Linear) -> str:
        return products.product(g, x, f"{name}.{part}", linear)

    entering = products.operand(g, x, f"{name}.query")
    query = g.op("Add", [product(entering, "query", attention.query), g.weight(f"{name}.query.bias", attention.query.bias)])
    key, value = product(entering, "key", attention.key), product(entering, "value", attention.value)
    context = g.op("MultiHeadAttention", [query, key, value], domain=FUSED, num_heads=attention.heads)
    output = product(products.operand(g, context, f"{name}.output"), "output", attention.output)
    output_bias = attention.output.bias + attention.output.weight @ attention.value.bias
    x = residual_norm(g, output, x, f"{name}.attention_norm", output_bias, layer.attention_norm)

    up = product(products.operand(g, x, f"{name}.up"), "up", layer.up)
    up = activated(g, up, f"{name}.up", layer.up, activation)
    down = product(products.operand(g, up, f"{name}.down"), "down", layer.down)
    return residual_norm(g, down, x, f"{name}.output_norm", layer.down.bias, layer.output_norm)
