"""Describes the machine and the installed packages of a measurement."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import psutil

from cloze.model_store.installation import DISTRIBUTION
from cloze.model_store.processor import instructions, processor_name
from cloze.service.machine import available_cpus

_PACKAGES = f"""{DISTRIBUTION} onnxruntime onnxruntime-gpu tokenizers uvicorn fastapi torch
transformers infinity-emb sentence-transformers optimum optimum-intel openvino"""

_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")

_LIST_VERSIONS = (
    "import importlib.metadata as m, json, sys\n"
    "names = {d.metadata['Name'] or '': d.version for d in m.distributions()}\n"
    "names = {name.lower().replace('_', '-'): version for name, version in names.items()}\n"
    "print(json.dumps({name: names[name] for name in sys.argv[1:] if name in names}))"
)


def describe_machine() -> dict[str, str]:
    """Return NVIDIA's cards, the processor, the cores of this process, memory and the system."""
    listed = instructions()
    drivers = Path("/proc/driver/nvidia/gpus").glob("*/information")
    lines = [line for each in drivers for line in each.read_text().splitlines()]
    cards = [line.removeprefix("Model:").strip() for line in lines if line.startswith("Model:")]
    return ({"GPU": ", ".join(cards)} if cards else {}) | {
        "processor": processor_name(),
        "instructions": " ".join(each for each in _INSTRUCTION_SETS if each in listed),
        "cores": str(available_cpus()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


def stolen_share() -> float:
    """Return other guests' share of processor time since the last call; 0 but for Linux."""
    return getattr(psutil.cpu_times_percent(), "steal", 0.0) / 100


def installed_versions(python: str = sys.executable) -> dict[str, str]:
    """Return the versions of the packages that matter here, in an interpreter's environment.

    Raises:
        CalledProcessError: the interpreter failed.
        OSError: the interpreter does not start.
    """
    output = subprocess.run(
        [python, "-c", _LIST_VERSIONS, *_PACKAGES.split()],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    versions: dict[str, str] = json.loads(output)
    return versions
