"""Online: a bundle answers. Never imports torch, transformers or onnx; never sees the export stage."""
