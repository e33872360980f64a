"""The contract between export and service: what a bundle promises and how the store keeps bundles.

This package depends on numpy and pydantic only, not on torch, onnx, onnxruntime or HTTP libraries.
"""

from cloze.model_store.manifest import Manifest
from cloze.model_store.store import Bundle, Store, StoreError

__all__ = ["Bundle", "Manifest", "Store", "StoreError"]
