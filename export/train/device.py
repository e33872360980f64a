"""The device of a run: its choice by name, and the precision of its matrix products."""

import ctypes
import re
from contextlib import AbstractContextManager

import torch

from cloze.export.errors import TrainError

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of glibc's ``mallopt``."""


def keep_freed_memory() -> None:
    """Make malloc keep the memory that is freed, until `return_freed_memory`.

    By default, glibc returns large tensors to the system, and the next step waits until the system
    has filled the same pages with zeros. Without glibc, nothing happens. docs/decisions/0010 has
    the measurements.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Return the memory that malloc keeps to the system.

    Tensors of different sizes leave gaps, so the kept memory would grow with every step.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def open_device(name: str) -> torch.device:
    """Return the device of a name: ``cpu``, ``cuda``, ``cuda:N``, or ``auto``.

    ``auto`` is ``cuda`` if a CUDA device is available, else ``cpu``.

    Raises:
        TrainError: the name is unknown, or the device cannot be used.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", name):
        raise TrainError(f"device {name!r} is unknown; auto, cpu, cuda or cuda:N")
    try:
        device = torch.device(name)
        torch.zeros((), device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise TrainError(f"device {name!r} cannot be used: {reason}") from error
    return device


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Return a context in which matrix products have the precision ``fp32``, ``bf16`` or ``auto``.

    ``auto`` is bf16 if the processor has instructions for bf16, else fp32.
    """
    uses_bf16 = precision == "bf16" or (precision == "auto" and _has_bf16(device))
    return torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16)


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
