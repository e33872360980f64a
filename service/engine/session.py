"""Runs one graph with onnxruntime: on a CPU, or on CUDA with all inputs in one copy. Knows no bundle and no query."""

import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np

os.environ.setdefault(
    "ORT_DISABLE_TELEMETRY", "1"
)  # the official builds otherwise report to their maker from the import on
import onnxruntime as ort
from numpy.typing import NDArray

from model_store.layouts import Feeds
from model_store.processor import cuda_settings, int8_instructions, int8_settings
from service.core import StartupError
from service.engine.pinned import page_locked

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

_BUILDS = ("onnxruntime", "onnxruntime-gpu")

_ON_HOST = frozenset({"top_k"})
"""Inputs that the kernels read on the host."""

_ALIGNMENT = 256
"""Bytes, of each input on the device."""


class Session(Protocol):
    """What runs a graph. Several threads may do so at once."""

    def run(self, wanted: Sequence[str], feeds: Feeds) -> list[NDArray[Any]]:
        """The outputs named, in order."""


def providers() -> list[str]:
    """What this build of onnxruntime can run on.

    Raises:
        StartupError: two builds are installed, in one place.
    """
    if all(map(_is_installed, _BUILDS)):
        raise StartupError(
            f"both {' and '.join(_BUILDS)} are installed, and overwrite each other; "
            "uninstall both, then install cloze[cpu] or cloze[gpu]"
        )
    there: list[str] = ort.get_available_providers()
    return there


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def cpu_session(file: Path, threads: int = 1) -> ort.InferenceSession:
    """A graph on this machine's processor, so many threads a run: with one, the scheduler's workers bring the cores."""
    options = _options()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for name, value in int8_settings(int8_instructions()).items():
        options.add_session_config_entry(name, value)
    session = ort.InferenceSession(file, options, providers=[CPU])
    session.disable_fallback()
    return session


def cuda_session(file: Path, device_id: int, memory_limit: int) -> "DeviceSession":
    """A graph on a GPU, all of it.

    Args:
        file: the graph.
        device_id: which GPU.
        memory_limit: bytes of the device's memory that it may take; 0: all there is.

    Raises:
        StartupError: CUDA did not come up; says which library is missing, if one is.
    """
    with redirect_stdout(None):  # what it misses, we say ourselves
        ort.preload_dlls()
    options = _options()
    options.enable_mem_pattern = False  # it is made for one shape, and every batch has its own
    asked = {
        "device_id": str(device_id),
        "arena_extend_strategy": "kSameAsRequested",
    } | cuda_settings()
    if memory_limit:
        asked["gpu_mem_limit"] = str(memory_limit)
    try:
        session = ort.InferenceSession(
            file, options, providers=[(CUDA, asked), CPU], enable_fallback=0
        )
    except Exception as error:  # without CUDA, a CPU has no kernel for a packed graph
        if why := _why_not():
            raise StartupError(f"CUDA did not come up: {why}") from error
        raise
    if session.get_providers()[0] != CUDA:
        raise StartupError(
            f"CUDA did not come up: {_why_not() or 'its driver is missing, or there is no such device'}"
        )
    return DeviceSession(session, "cuda", device_id)


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return options


def _why_not() -> str:
    """The loader's words about the library that CUDA's provider misses; empty if it misses none."""
    folder = Path(ort.__file__).parent / "capi"
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return str(error)
    return ""


_Buffers = tuple[NDArray[np.uint8], ort.OrtValue]
"""On the host and on the device, of one size."""


class DeviceSession:
    """A session whose inputs go to the device in one copy, from and into buffers that are used again.

    Args:
        session: on the device.
        device: ``cuda``, or ``cpu``, where the same way is tested.
        device_id: which one.
    """

    def __init__(self, session: ort.InferenceSession, device: str, device_id: int) -> None:
        self._session, self._device, self._device_id = session, device, device_id
        self._free: dict[int, list[_Buffers]] = defaultdict(
            list
        )  # by size; while one batch runs, another is being packed
        self._running = threading.Lock()

    def run(self, wanted: Sequence[str], feeds: Feeds) -> list[NDArray[Any]]:
        """See `Session`."""
        binding = self._session.io_binding()
        for name in _ON_HOST & feeds.keys():
            binding.bind_cpu_input(name, feeds[name])
        inputs = {
            name: np.ascontiguousarray(array)
            for name, array in feeds.items()
            if name not in _ON_HOST
        }
        sizes = [-(-max(1, array.nbytes) // _ALIGNMENT) * _ALIGNMENT for array in inputs.values()]
        size = 1 << max(16, (sum(sizes) - 1).bit_length())
        free = self._free[size]
        try:
            buffers = free.pop()  # whole to other threads
        except IndexError:
            buffers = self._make_buffers(size)
        try:
            return self._run(binding, wanted, inputs, sizes, buffers)
        finally:
            free.append(buffers)

    def _run(
        self,
        binding: ort.IOBinding,
        wanted: Sequence[str],
        inputs: Feeds,
        sizes: Sequence[int],
        buffers: _Buffers,
    ) -> list[NDArray[Any]]:
        staging, there = buffers
        offset = 0
        for (name, array), size in zip(inputs.items(), sizes, strict=True):
            staging[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
            place = there.data_ptr() + offset
            binding.bind_input(
                name, self._device, self._device_id, array.dtype.type, list(array.shape), place
            )
            offset += size
        for name in wanted:
            binding.bind_output(name, "cpu")
        there.update_inplace(staging)
        with self._running:
            self._session.run_with_iobinding(binding)
        found: list[NDArray[Any]] = binding.copy_outputs_to_cpu()
        return found

    def _make_buffers(self, size: int) -> _Buffers:
        # Not the staging array, which on a CPU the value would be.
        there = ort.OrtValue.ortvalue_from_numpy(
            np.zeros(size, np.uint8), self._device, self._device_id
        )
        locked = page_locked(size, self._device_id) if self._device == "cuda" else None
        return np.zeros(size, np.uint8) if locked is None else locked, there
