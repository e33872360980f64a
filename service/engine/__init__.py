"""The only package of the service that imports onnxruntime.

`session` runs a graph on a CPU or on CUDA; `onnx_engine` chooses a bundle's graph and checks its
golden outputs.
"""

from cloze.service.engine.onnx_engine import OnnxEngine, SessionOptions

__all__ = ["OnnxEngine", "SessionOptions"]
