"""The processor's int8 instructions, and the onnxruntime settings that exact arithmetic needs.

Verification and serving use the same settings.
"""

from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
"""The file in which Linux lists the processor's instructions."""

_INT8 = frozenset({"avx512_vnni", "avx_vnni", "asimddp", "i8mm"})
"""Instructions for int8, by their names in `CPU_INFO`."""

INT8_NAMES = ", ".join(sorted(_INT8))

PACKED_ALIGNMENT = 64
"""The kernels read packed weights from addresses that are multiples of this; in bytes."""


def int8_instructions() -> list[str]:
    """Return the processor's int8 instructions; none if Linux does not list instructions."""
    return sorted(_instructions() & _INT8)


def int8_advantage() -> str | None:
    """Return what makes int8 faster than fp32 on this processor; None if nothing does.

    Processors of one kind give the same answer, so that replicas choose alike. On AVX2 the exact
    products were 1.24 times as fast as fp32 (Zen 3, 32 clients). AVX-512 without VNNI doubles
    the speed of fp32, and was not measured.
    """
    instructions = _instructions()
    if found := sorted(instructions & _INT8):
        return ", ".join(found)
    if "avx2" in instructions and "avx512f" not in instructions:
        return "avx2, where exact int8 is faster than fp32,"
    return None


def _instructions() -> set[str]:
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return set()
    return {
        word
        for line in lines
        if line.partition(":")[0].strip() in ("flags", "Features")
        for word in line.split()
    }


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
