"""The seam to onnxruntime: queries go in, outputs come out. Nobody else in the service speaks it.

`feeds` turns a batch into a graph's inputs and its outputs into answers, in either layout; `session` runs a graph, on a CPU or on
CUDA; `onnx_engine` chooses a bundle's graph and checks its goldens.
"""

from service.engine.onnx_engine import OnnxEngine

__all__ = ["OnnxEngine"]
