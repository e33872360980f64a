"""The offline part: exports a checkpoint as a bundle, and trains checkpoints.

This package depends on torch, onnx and the hub client, not on the service.
"""
