"""The device of a run, and the precision, which `accelerate` leaves to its caller."""

import os
import re

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState

from cloze.export.errors import TrainError


def open_device(name: str) -> torch.device:
    """Return this process's device by name: ``cpu``, ``cuda``, ``cuda:N``, or ``auto``.

    ``auto`` is ``cuda`` if a CUDA device is available, else ``cpu``. Each process that torchrun
    starts has a device of its own, and joins the others here.

    Raises:
        TrainError: the name is unknown, or the device cannot be used.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,2})?", name):
        raise TrainError(f"device {name!r} is unknown; auto, cpu, cuda or cuda:N")
    try:
        if name != "auto":
            torch.zeros((), device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise TrainError(f"device {name!r} cannot be used: {reason}") from error
    if ":" in name:
        os.environ["ACCELERATE_TORCH_DEVICE"] = name
    device: torch.device = PartialState(cpu=name == "cpu").device
    return device


def open_accelerator(device: torch.device, precision: str) -> Accelerator:
    """Return the accelerator of a run whose matrix products are ``fp32``, ``bf16`` or ``auto``.

    ``auto`` is bf16 if the processor has instructions for bf16, else fp32.
    """
    uses_bf16 = precision == "bf16" or (precision == "auto" and _has_bf16(device))
    # accelerate keeps one precision per process, and a process may run several recipes.
    AcceleratorState._reset_state(reset_partial_state=processes() == 1)
    is_cpu = device.type == "cpu"
    return Accelerator(cpu=is_cpu, mixed_precision="bf16" if uses_bf16 else "no")


def processes() -> int:
    """Return the number of processes of the run, on all machines."""
    return int(PartialState().num_processes)


def is_main() -> bool:
    """Return whether this process writes the files of the run."""
    return bool(PartialState().is_main_process)


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
