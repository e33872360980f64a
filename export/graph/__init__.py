"""The ONNX graph, authored operator by operator from a `Model`'s weights; never traced.

`builder` writes nodes and weights, `trunk` the encoder in one layout, `heads` what stands on it, `write` puts them
together. The tensors that cross into the service are those of `model_store.interface`.
"""

from export.graph.write import GraphWriter, round_weights

__all__ = ["GraphWriter", "round_weights"]
