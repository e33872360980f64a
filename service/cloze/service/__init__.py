"""The online stage: opens bundles and answers requests over HTTP.

The package never imports torch, transformers, onnx or `export`.
"""
