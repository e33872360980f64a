"""The blocks that encoders are built of: each has its torch module and its graph in one file.

`config` has the sizes of an encoder, `layer` a transformer layer with its parts, `encoder` the
embeddings and the stack of layers.
"""
