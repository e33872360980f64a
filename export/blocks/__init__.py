"""The blocks that encoders are built of: each file has a block's torch module and its graph.

- `config` has the sizes of an encoder, `products` the description of a block's matrix products.
- `activations`, `embeddings`, `attention` and `layer` are the blocks.
- `encoder` stacks them.
"""
