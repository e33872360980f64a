"""The ONNX graph, written operator by operator from a `Model`'s weights; never traced.

`builder` writes nodes and weights. `trunk` is the encoder, `layouts` how a batch lies in memory,
`products` how matrix products are computed. The heads are in `export.heads`; `write` puts all
together. `reference` computes what a packed graph means where no kernel runs it.
"""
