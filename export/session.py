"""What runs a graph while it is exported: onnxruntime on this machine's processor, or the reference."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from export.graph.reference import ReferenceSession
from model_store.manifest import Layout
from model_store.processor import int8_instructions, int8_settings

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # the official builds otherwise report to their maker from the import on
import onnxruntime as ort


class Session(Protocol):
    """What runs a graph."""

    def run(self, wanted: Sequence[str], feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """The outputs named, in order."""


def open_session(file: Path, layout: Layout) -> Session:
    """What runs a graph on this machine's processor: the runtime, or for packed ones the reference."""
    if layout is Layout.PACKED:
        return ReferenceSession(file)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    for setting, value in int8_settings(int8_instructions()).items():
        options.add_session_config_entry(setting, value)
    session: Session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return session
