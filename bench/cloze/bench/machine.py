"""Describes the machine and the installed packages of a measurement."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from cloze.model_store.installation import DISTRIBUTION

_PACKAGES = (
    DISTRIBUTION,
    "onnxruntime",
    "onnxruntime-gpu",
    "tokenizers",
    "uvicorn",
    "fastapi",
    "torch",
    "transformers",
    "infinity-emb",
    "sentence-transformers",
    "optimum",
    "optimum-intel",
    "openvino",
)

_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")

_LIST_VERSIONS = (
    "import importlib.metadata as m, json, sys\n"
    "names = {d.metadata['Name'] or '': d.version for d in m.distributions()}\n"
    "names = {name.lower().replace('_', '-'): version for name, version in names.items()}\n"
    "print(json.dumps({name: names[name] for name in sys.argv[1:] if name in names}))"
)


def describe_machine(cores: int) -> dict[str, str]:
    """Return the processor, its cores, the memory and the system."""
    processor, flags = platform.processor() or platform.machine(), set[str]()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                processor = value.strip()
            elif name.strip() == "flags":
                flags = set(value.split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": processor,
        "instructions": " ".join(flag for flag in _INSTRUCTION_SETS if flag in flags),
        "cores": str(cores),
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


def processor_time(stat: Path = Path("/proc/stat")) -> tuple[int, int]:
    """Return the ticks of all cores so far that other guests of the host took, and all ticks.

    Both are 0 where the system does not count them.
    """
    try:
        ticks = [int(tick) for tick in stat.read_text().splitlines()[0].split()[1:]]
    except OSError:
        return 0, 0
    return ticks[7], sum(ticks[:8])  # user, nice, system, idle, iowait, irq, softirq, steal


def stolen_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the share that other guests took between two values of `processor_time`."""
    return (after[0] - before[0]) / max(1, after[1] - before[1])


def installed_versions(python: str = sys.executable) -> dict[str, str]:
    """Return the versions of the packages that matter here, in an interpreter's environment.

    Raises:
        CalledProcessError: the interpreter failed.
        OSError: the interpreter does not start.
    """
    output = subprocess.run(
        [python, "-c", _LIST_VERSIONS, *_PACKAGES], capture_output=True, text=True, check=True
    ).stdout
    versions: dict[str, str] = json.loads(output)
    return versions
