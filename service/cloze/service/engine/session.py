"""Sessions of onnxruntime, each with one graph: on a CPU, or on CUDA with one copy of inputs."""

import ctypes
import filecmp
import logging
import os
import re
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from cloze.model_store.error_lines import first_line
from cloze.model_store.installation import install_command
from cloze.model_store.layouts import Feeds
from cloze.model_store.processor import (
    PACKED_ALIGNMENT,
    cuda_settings,
    int8_instructions,
    int8_settings,
)
from cloze.model_store.system import return_freed_memory
from cloze.service.engine.cpu_places import SpreadSession
from cloze.service.errors import StartupError

log = logging.getLogger("cloze")

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

_BUILDS = ("onnxruntime", "onnxruntime-gpu")

_ON_HOST = frozenset({"top_k"})
"""Inputs that the kernels read in host memory."""

_SHARED_BYTES = 128 * 1024
"""Smaller weights stay in the graph. They are little memory, and vectors are among them, as long as
a vocabulary of 30,522: behind one of an odd size, no packed weight would be aligned."""

_PREPARE = {
    "session.optimized_model_external_initializers_file_name": "weights.bin",
    "session.optimized_model_external_initializers_min_size_in_bytes": str(_SHARED_BYTES),
    "session.save_external_prepacked_constant_initializers": "1",
}
"""Settings that write a graph with its weights packed for the kernels of this processor."""

_PACKED = re.compile(rb"\w\+\d+\|(\d+);")
"""The place of a packed weight: the kernel, a hash, and the offset in the file of weights."""

_OPENING = threading.Lock()  # held for what engines that open side by side must not do at once

_ALIGNMENT = 256
"""Alignment of each input in the device buffer, in bytes."""


class Session(Protocol):
    """Runs a graph. Several threads may call ``run`` at once."""

    def run(self, wanted: Sequence[str], feeds: Feeds) -> list[NDArray[Any]]:
        """Return the outputs named in ``wanted``, in order."""
        ...


def providers() -> list[str]:
    """Return the execution providers of the installed build of onnxruntime.

    Raises:
        StartupError: both builds of onnxruntime are installed.
    """
    if all(any(metadata.distributions(name=build)) for build in _BUILDS):
        raise StartupError(
            f"both {' and '.join(_BUILDS)} are installed, and overwrite each other; "
            f"uninstall both, then: {install_command('cpu')} (or gpu instead of cpu, for CUDA)"
        )
    available: list[str] = ort.get_available_providers()
    return available


def cpu_session(
    file: Path, threads: int = 1, alone_threads: int = 0, adapted: Path | None = None
) -> Session:
    """Open a graph on the CPU.

    Args:
        file: the graph.
        threads: intra-op threads per run. One thread is enough where several workers run at once.
        alone_threads: intra-op threads of a run that has the machine to itself. If the number is
            above `threads`, the result is a `CpuSession`.
        adapted: the graph of the same weights that takes adapters. With it, the result is a
            `CpuSession` in any case.

    Raises:
        StartupError: no folder for temporary files is on a disk, and adapters need one.
    """
    options = _cpu_options(threads)
    if adapted is None and alone_threads <= threads:
        return SpreadSession(file, options)
    folder = temporary_folder()
    if folder is None and adapted is None:
        log.info("a lone request runs on one core: no folder for temporary files is on a disk")
        return SpreadSession(file, options)
    if folder is None:
        raise StartupError(
            "adapters need a folder for temporary files on a disk: set TMPDIR to one"
        )
    try:
        return _open_sharing(file, adapted, folder, threads, alone_threads)
    except Exception as error:  # the runtime's errors have no common type
        if adapted is not None:
            raise
        session = SpreadSession(file, options)  # raises if the graph is at fault
        reason = first_line(error)
        log.warning("a lone request runs on one core: %s is not usable: %s", folder, reason)
        return session


@dataclass(frozen=True, slots=True)
class CpuSession:
    """A session for batches that run side by side, and one for a batch that runs alone.

    With one session of several threads, batches side by side would have more threads than cores,
    and the throughput would fall (docs/decisions/0013-a-lone-request.md).

    Attributes:
        side_by_side: the session with few threads per run.
        alone: the session with a thread per core.
        adapted: the same of the graph that takes adapters, if any.
    """

    side_by_side: Session
    alone: Session
    adapted: "CpuSession | None" = None

    def run(self, wanted: Sequence[str], feeds: Feeds) -> list[NDArray[Any]]:
        """See `Session`."""
        return self.side_by_side.run(wanted, feeds)


def _open_sharing(
    file: Path, adapted: Path | None, folder: Path, threads: int, alone_threads: int
) -> CpuSession:
    """Open sessions that share the weights, as onnxruntime packs them for its kernels.

    onnxruntime writes the packed weights to a file, and all sessions map the file. The file has
    no name any more when this function returns, so it ends with the process.
    """
    with TemporaryDirectory(prefix="cloze-", dir=folder, ignore_cleanup_errors=True) as name:
        prepared, other = Path(name, "graph.onnx"), Path(name, "adapted", "graph.onnx")
        _prepare(file, prepared)
        if adapted is None:
            return _open_pair(prepared, threads, alone_threads)
        other.parent.mkdir()
        _prepare(adapted, other)
        weights = _PREPARE["session.optimized_model_external_initializers_file_name"]
        if not other.with_name(weights).exists():
            log.debug("all weights are small, and each session has its own")
        elif filecmp.cmp(prepared.with_name(weights), other.with_name(weights), shallow=False):
            other = other.rename(prepared.with_name("adapted.onnx"))
        else:
            log.warning("the graph with adapters has weights of its own in memory")
        own = _open_pair(prepared, threads, alone_threads)
        return replace(own, adapted=_open_pair(other, threads, alone_threads))


def _open_pair(file: Path, threads: int, alone_threads: int) -> CpuSession:
    """Open the two sessions of a graph; one serves for both if it has as many threads."""
    side_by_side = SpreadSession(file, _cpu_options(threads))
    return_freed_memory()
    alone = side_by_side
    if alone_threads > threads:
        with _OPENING:  # else sessions take each other's threads for their own
            alone = SpreadSession(file, _cpu_options(alone_threads))
        return_freed_memory()
    return CpuSession(side_by_side, alone)


def _prepare(file: Path, prepared: Path) -> None:
    """Write a graph with its weights packed for the kernels.

    Raises:
        ValueError: a packed weight is where the kernels cannot read it.
    """
    options = _cpu_options(1)
    options.optimized_model_filepath = str(prepared)
    for key, value in _PREPARE.items():
        options.add_session_config_entry(key, value)
    ort.InferenceSession(file, options, providers=[CPU], enable_fallback=0)
    return_freed_memory()
    if not is_aligned(prepared.read_bytes()):
        raise ValueError("its weights are packed, but not aligned")


def is_aligned(graph: bytes) -> bool:
    """Whether the packed weights of a graph are where the kernels can read them.

    onnxruntime 1.31 writes them without gaps, so that any weight of another size moves those behind
    it. From other addresses, the kernels end the process.
    """
    return all(int(offset) % PACKED_ALIGNMENT == 0 for offset in _PACKED.findall(graph))


def _cpu_options(threads: int) -> ort.SessionOptions:
    options = _options()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads of a run wait for each other about a hundred times per run, and a thread that sleeps
    # wakes up late. They stop spinning when the run ends, and soon while a session opens.
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(threads > 1)))
    options.add_session_config_entry("session.intra_op.spin_duration_us", "1000")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    for name, value in int8_settings(int8_instructions()).items():
        options.add_session_config_entry(name, value)
    return options


def temporary_folder(mounts: Path = Path("/proc/mounts")) -> Path | None:
    """Return a writable folder for temporary files on a disk; None if all are in memory.

    None on Windows as well, where a mapped file keeps its name.
    """
    if sys.platform == "win32":
        return None
    kinds: dict[Path, str] = {}  # by the place where a file system is mounted
    with suppress(OSError):  # not Linux
        for line in mounts.read_text().splitlines():
            _, place, kind, _ = line.split(" ", 3)
            kinds[Path(place)] = kind  # the last one holds
    for name in (os.environ.get("TMPDIR"), "/var/tmp", "/tmp"):
        if name and os.access(name, os.W_OK):
            resolved = Path(name).resolve()
            mounted = (kinds[path] for path in (resolved, *resolved.parents) if path in kinds)
            if next(mounted, "") not in ("tmpfs", "ramfs"):
                return Path(name)
    return None


def cuda_session(file: Path, device_id: int, memory_limit: int) -> "DeviceSession":
    """Open a graph on a GPU, with at most so many bytes of its memory; 0 sets no limit.

    Raises:
        StartupError: CUDA did not come up; the error names the missing library, if any.
    """
    # onnxruntime prints missing libraries; our error names them.
    with _OPENING, redirect_stdout(None):
        ort.preload_dlls()
    options = _options()
    options.enable_mem_pattern = False  # a memory pattern serves one shape, and batches differ
    provider_options = {
        "device_id": str(device_id),
        "arena_extend_strategy": "kSameAsRequested",
    } | cuda_settings()
    if memory_limit:
        provider_options["gpu_mem_limit"] = str(memory_limit)
    providers = [(CUDA, provider_options), CPU]
    try:
        session = ort.InferenceSession(file, options, providers=providers, enable_fallback=0)
    except Exception as error:  # a CPU has no kernel for a packed graph
        if reason := _cuda_load_error():
            raise StartupError(f"CUDA did not come up: {reason}") from error
        raise
    if session.get_providers()[0] != CUDA:
        reason = _cuda_load_error() or "its driver is missing, or there is no such device"
        raise StartupError(f"CUDA did not come up: {reason}")
    return DeviceSession(session, "cuda", device_id)


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # each error is an exception too, and becomes one line
    return options


def _cuda_load_error() -> str:
    """Return the loader's message about a library that CUDA's provider lacks, or ""."""
    folder = Path(ort.__file__).parent / "capi"
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return str(error)
    return ""


@cache
def runtime() -> ctypes.CDLL | None:
    """Return CUDA's runtime library in the version of onnxruntime; None without such a library."""
    try:
        from onnxruntime.capi.build_and_package_info import cuda_version

        return ctypes.CDLL(f"libcudart.so.{cuda_version.partition('.')[0]}")
    except (ImportError, OSError):  # a CPU build of onnxruntime has no `cuda_version`
        return None


def page_locked(size: int, device_id: int) -> NDArray[np.uint8] | None:
    """Allocate page-locked memory, which is freed with the returned array.

    A GPU reads such memory directly. The driver copies pageable memory to page-locked memory first,
    and that copy costs time.

    Returns:
        [size] uint8, uninitialised; None if CUDA cannot allocate the memory.
    """
    cuda, address = runtime(), ctypes.c_void_p()
    if cuda is None:
        return None
    if (
        cuda.cudaSetDevice(device_id)
        or cuda.cudaMallocHost(ctypes.byref(address), ctypes.c_size_t(size))
        or not address.value
    ):
        cuda.cudaGetLastError()  # clears the error; else the next kernel launch would report it
        return None
    array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address.value))
    # At the exit of the process CUDA frees the memory itself, and earlier than this finalizer.
    weakref.finalize(array, cuda.cudaFreeHost, address).atexit = False
    return array


_Buffers = tuple[NDArray[np.uint8], ort.OrtValue]
"""A host buffer and a device buffer of the same size."""


class DeviceSession:
    """A session that copies all inputs of a batch to the device at once, through reused buffers.

    The device is ``cuda``, or ``cpu`` for tests.
    """

    def __init__(self, session: ort.InferenceSession, device: str, device_id: int) -> None:
        self._session, self._device, self._device_id = session, device, device_id
        # By size. One thread fills buffers while the batch of another thread runs.
        self._free: dict[int, list[_Buffers]] = defaultdict(list)
        self._run_lock = threading.Lock()

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
            buffers = free.pop()  # atomic, hence without a lock
        except IndexError:
            buffers = self._make_buffers(size)
        try:
            self._bind_inputs(binding, inputs, sizes, buffers)
            for name in wanted:
                binding.bind_output(name, "cpu")
            with self._run_lock:
                self._session.run_with_iobinding(binding)
            outputs: list[NDArray[Any]] = binding.copy_outputs_to_cpu()
            return outputs
        finally:
            free.append(buffers)

    def _bind_inputs(
        self, binding: ort.IOBinding, inputs: Feeds, sizes: Sequence[int], buffers: _Buffers
    ) -> None:
        """Copy contiguous inputs to the device, and bind each to its part of the device buffer."""
        host_buffer, device_buffer = buffers
        offset = 0
        for (name, array), size in zip(inputs.items(), sizes, strict=True):
            host_buffer[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
            address = device_buffer.data_ptr() + offset
            binding.bind_input(
                name, self._device, self._device_id, array.dtype.type, list(array.shape), address
            )
            offset += size
        device_buffer.update_inplace(host_buffer)

    def _make_buffers(self, size: int) -> _Buffers:
        # On a CPU the value shares the memory of its array, so that the host buffer needs another.
        device_buffer = ort.OrtValue.ortvalue_from_numpy(
            np.zeros(size, np.uint8), self._device, self._device_id
        )
        locked = page_locked(size, self._device_id) if self._device == "cuda" else None
        return np.zeros(size, np.uint8) if locked is None else locked, device_buffer
