"""What a processor can do, and how a session must be set for it: the same where graphs are verified and served."""

from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
"""Where Linux says what the processor can do."""

_INT8 = frozenset({"avx512_vnni", "avx_vnni", "asimddp", "i8mm"})
"""By their names in `CPU_INFO`."""

INT8_NAMES = ", ".join(sorted(_INT8))


def int8_instructions() -> list[str]:
    """Those instructions for int8 that Linux says are there; none where it does not say."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return []
    words = {
        word
        for line in lines
        if line.partition(":")[0].strip() in ("flags", "Features")
        for word in line.split()
    }
    return sorted(words & _INT8)


def int8_settings(instructions: list[str]) -> dict[str, str]:
    """Session settings of onnxruntime for exact int8.

    Without those instructions x86 sums products of u8 and s8 in 16 bits, which overflow; told so, the runtime takes a way that
    does not. With them that way is needless and takes twice the time (40 tokens of MiniLM: 7.3 ms against 4.0).
    """
    return {} if instructions else {"session.x64quantprecision": "1"}


def cuda_settings() -> dict[str, str]:
    """Settings of onnxruntime's CUDA provider on which a packed graph's digits depend."""
    return {"use_tf32": "0"}  # the heads are fp32 for their digits' sake
