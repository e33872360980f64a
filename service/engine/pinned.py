"""Page-locked host memory, which a GPU reads directly.

The driver copies pageable memory to page-locked memory first, and that copy costs time.
"""

import ctypes
import weakref
from functools import cache

import numpy as np
from numpy.typing import NDArray


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

    Args:
        size: bytes to allocate.
        device_id: index of the GPU that the calling thread uses.

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
