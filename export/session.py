"""What runs a graph while it is exported: onnxruntime on this machine's processor or GPU, or the reference."""

import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from export.errors import ExportError, first_line
from export.graph.reference import ReferenceSession
from model_store.manifest import Layout
from model_store.processor import cuda_settings, int8_instructions, int8_settings

os.environ.setdefault(
    "ORT_DISABLE_TELEMETRY", "1"
)  # the official builds otherwise report to their maker from the import on
import onnxruntime as ort

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class Session(Protocol):
    """What runs a graph."""

    def run(self, wanted: Sequence[str], feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """The outputs named, in order."""


def open_session(file: Path, layout: Layout, *, cuda: bool = False) -> Session:
    """What runs a graph: the runtime on this machine's processor; a packed one, that on CUDA if asked for, else the reference.

    Raises:
        ExportError: CUDA was asked for and did not come up.
    """
    packed = layout is Layout.PACKED
    if packed and not cuda:
        return ReferenceSession(file)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if packed:
        return _on_cuda(file, options)
    for setting, value in int8_settings(int8_instructions()).items():
        options.add_session_config_entry(setting, value)
    session: Session = ort.InferenceSession(file, options, providers=[CPU])
    return session


def _on_cuda(file: Path, options: ort.SessionOptions) -> Session:
    if CUDA not in ort.get_available_providers():
        raise ExportError(
            "CUDA was asked for, but this onnxruntime has no provider for it; install cloze[gpu] instead of cloze[cpu]"
        )
    with redirect_stdout(sys.stderr):  # it prints which libraries it misses
        ort.preload_dlls()
    options.enable_mem_pattern = False
    try:
        session: Session = ort.InferenceSession(
            file, options, providers=[(CUDA, cuda_settings())], enable_fallback=0
        )
    except Exception as error:  # the runtime's errors have no common type
        raise ExportError(
            f"CUDA did not come up, or lacks a kernel: {first_line(error)}"
        ) from error
    return session
