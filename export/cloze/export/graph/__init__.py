"""The ONNX graph, written operator by operator from a `Model`'s weights; never traced.

- `builder` collects nodes and weights and saves them.
- `linear_ops` writes matrix products in fp32, int8 or fp16.
- `trunk` is the graph of an encoder, in the dense or the packed layout; the blocks write to it.
- `session` opens a session of a written graph, also of a packed one on a CPU.
"""
