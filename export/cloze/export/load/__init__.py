"""Loads a checkpoint: its files, its settings, its tokenizer and its tensors.

`source` finds and reads files. `checkpoint` puts the parts together.
"""
