"""Offline: a checkpoint becomes a bundle. Knows torch, onnx and the hub; refuses to know the service."""
