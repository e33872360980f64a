"""The contract between export and service: what a bundle promises, and where it lies on disk.

This room knows files, hashes and the manifest. It refuses to know torch, onnx, onnxruntime and HTTP.
"""

from model_store.manifest import Manifest
from model_store.store import Bundle, Store, StoreError

__all__ = ["Bundle", "Manifest", "Store", "StoreError"]
