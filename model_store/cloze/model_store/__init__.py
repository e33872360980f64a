"""The contract between export and service: what a bundle promises and how the store keeps bundles.

This package depends on numpy and pydantic only, not on torch, onnx, onnxruntime or HTTP libraries.
"""

import os

from cloze.model_store.manifest import Manifest
from cloze.model_store.store import Bundle, Store, StoreError

# The official builds of onnxruntime write an identity to the home folder and send telemetry from
# their import on, unless this variable is set. Whatever imports onnxruntime imports this package.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["Bundle", "Manifest", "Store", "StoreError"]
