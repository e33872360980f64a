"""Page-locked memory of the host, which a GPU reads by itself instead of having it copied to such a place first."""

import ctypes
import weakref
from functools import cache

import numpy as np
from numpy.typing import NDArray


@cache
def runtime() -> ctypes.CDLL | None:
    """CUDA's runtime library, of the version that this onnxruntime is built for; None where there is none."""
    try:
        from onnxruntime.capi.build_and_package_info import cuda_version

        return ctypes.CDLL(f"libcudart.so.{cuda_version.partition('.')[0]}")
    except (ImportError, OSError):  # a build for a CPU has no such name
        return None


def page_locked(size: int, device_id: int) -> NDArray[np.uint8] | None:
    """So many bytes, given back with the array; None where the machine does not give them, and pageable memory must do.

    Args:
        size: bytes, uninitialised.
        device_id: which GPU the calling thread works with.
    """
    cuda, place = runtime(), ctypes.c_void_p()
    if cuda is None:
        return None
    if (
        cuda.cudaSetDevice(device_id)
        or cuda.cudaMallocHost(ctypes.byref(place), ctypes.c_size_t(size))
        or not place.value
    ):
        cuda.cudaGetLastError()  # takes the error back, for which the next kernel would be blamed
        return None
    array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(place.value))
    weakref.finalize(array, cuda.cudaFreeHost, place).atexit = False  # at the end CUDA goes first
    return array
