"""The ONNX graph, authored operator by operator from a `Model`'s weights; never traced.

`builder` writes nodes and weights. `trunk` is the encoder; how a batch lies in it is `layouts`' business, how a product is
computed that of `products`. `heads` stand on it, `write` puts them together, and `reference` says what a packed graph means
where no kernel runs it. The tensors that cross into the service are those of `model_store.interface`.
"""

from export.graph.write import GraphWriter, check_layout, round_weights

__all__ = ["GraphWriter", "check_layout", "round_weights"]
