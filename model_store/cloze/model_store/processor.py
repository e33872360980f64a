"""The processor's int8 instructions, and the onnxruntime settings that exact arithmetic needs.

Verification and serving use the same settings.
"""

import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
"""The file in which Linux lists the processor's instructions."""

_INT8 = frozenset({"avx512_vnni", "avx_vnni", "asimddp", "i8mm"})
"""Instructions for int8, by their names in `CPU_INFO`."""

INT8_NAMES = ", ".join(sorted(_INT8))

PACKED_ALIGNMENT = 64
"""The kernels read packed weights from addresses that are multiples of this; in bytes."""


def processor_name() -> str:
    """Return the name of the processor; its architecture if the system lists no name."""
    names = [value for field, value in _fields() if field == "model name"]
    return names[0] if names else platform.processor() or platform.machine()


def int8_instructions() -> list[str]:
    """Return the processor's int8 instructions; none if the system does not list instructions."""
    return sorted(instructions() & _INT8)


def int8_advantage() -> str | None:
    """Return what makes int8 faster than fp32 on this processor; None if nothing does.

    Processors of one kind give the same answer, so that replicas choose alike. On AVX2 the exact
    products were 1.24 times as fast as fp32 (Zen 3, 32 clients). AVX-512 without VNNI doubles
    the speed of fp32, and was not measured.
    """
    listed = instructions()
    if found := sorted(listed & _INT8):
        return ", ".join(found)
    if "avx2" in listed and "avx512f" not in listed:
        return "avx2"
    return None


def instructions() -> set[str]:
    """Return the processor's instructions by Linux's names; none on another system."""
    return {
        word
        for field, value in _fields()
        if field in ("flags", "Features")
        for word in value.split()
    }


def _fields() -> Iterator[tuple[str, str]]:
    with suppress(OSError):  # another system
        for line in CPU_INFO.read_text().splitlines():
            field, _, value = line.partition(":")
            yield field.strip(), value.strip()


def int8_settings(instructions: list[str]) -> dict[str, str]:
    """Return the session settings of onnxruntime for exact int8.

    Without int8 instructions, x86 sums products of u8 and s8 in 16 bits, and the sums overflow.
    The setting selects a slower algorithm without overflow. With int8 instructions the setting is
    unnecessary and doubles the time (40 tokens of MiniLM: 7.3 ms instead of 4.0 ms).
    """
    return {} if instructions else {"session.x64quantprecision": "1"}


def cuda_settings() -> dict[str, str]:
    """Return the settings of the CUDA provider that change the digits of a packed graph."""
    return {"use_tf32": "0"}  # the heads compute in fp32, and tf32 would round their inputs
