"""The blocks that encoders are built of: each has its torch module and its graph in one file.

`config` has the sizes of an encoder, `layer` attention and a transformer layer, `encoder` the
embeddings and the stack of layers.
"""
