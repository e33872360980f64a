"""Opens a session of a graph during export: onnxruntime on a CPU or GPU, or the reference."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

import onnxruntime as ort
from numpy.typing import NDArray

from cloze.export.errors import ExportError
from cloze.export.graph.reference import ReferenceSession
from cloze.model_store.error_lines import first_line
from cloze.model_store.installation import install_command
from cloze.model_store.layouts import Layout
from cloze.model_store.processor import cuda_settings, int8_instructions, int8_settings

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class Session(Protocol):
    """Runs one graph."""

    def run(
        self, output_names: Sequence[str], feeds: dict[str, NDArray[Any]]
    ) -> list[NDArray[Any]]:
        """Return the named outputs, in order."""


def open_session(file: Path, layout: Layout, *, cuda: bool = False) -> Session:
    """Open a session of a graph.

    A dense graph runs on the CPU. A packed graph runs on CUDA if requested, else in the reference.

    Raises:
        ExportError: CUDA was requested but is not available.
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
            "CUDA was asked for, but this onnxruntime has no CUDA provider; uninstall onnxruntime, "
            f"then: {install_command('gpu')}"
        )
    with redirect_stdout(sys.stderr):  # preload_dlls prints the missing libraries
        ort.preload_dlls()
    options.enable_mem_pattern = False
    try:
        session: Session = ort.InferenceSession(
            file, options, providers=[(CUDA, cuda_settings())], enable_fallback=0
        )
    except Exception as error:  # the runtime's errors have no common type
        raise ExportError(f"CUDA did not start, or lacks a kernel: {first_line(error)}") from error
    return session
