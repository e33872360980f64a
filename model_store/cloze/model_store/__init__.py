"""The contract between export and service: what a bundle promises and how the store keeps bundles.

This package depends on numpy and pydantic only, not on torch, onnx, onnxruntime or HTTP libraries.
Its classes are imported at their first use, which `cloze ask` does not have.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloze.model_store.manifest import Manifest
    from cloze.model_store.store import Bundle, Store, StoreError

# The official builds of onnxruntime write an identity to the home folder and send telemetry from
# their import on, unless this variable is set. Whatever imports onnxruntime imports this package.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = ["Bundle", "Manifest", "Store", "StoreError"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "manifest" if name == "Manifest" else "store"
    return getattr(import_module(f"{__name__}.{module}"), name)
