"""The only package of the service that imports onnxruntime.

`session` runs a graph on a CPU or on CUDA; `onnx_engine` runs the graph of a bundle that
`graph_choice` chooses, and checks its golden outputs.
"""
