"""The ONNX graph, written operator by operator from a `Model`'s weights; never traced.

- `builder` collects nodes and weights and saves them.
- `layers` has the layers that the trunk and the heads share.
- `layouts` writes the parts that differ between dense and packed batches.
- `linear_ops` writes matrix products in fp32, int8 or fp16.
- `trunk` writes the encoder; `cloze.export.heads` writes the heads.
- `write` combines these modules to a graph.
- `reference` runs a packed graph on a CPU.
"""
