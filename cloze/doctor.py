"""``cloze doctor``: what this machine can do for the server, and what to do about each finding."""

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import click

from cloze.model_store.installation import build, install_command
from cloze.model_store.processor import int8_advantage, int8_instructions, processor_name
from cloze.model_store.store import Store, StoreError
from cloze.options import json_option, store_option
from cloze.tables import print_rows

_EXTRAS = {
    "export": ("huggingface_hub", "onnx", "safetensors", "torch"),
    "train": ("matplotlib", "torch"),
    "bench": ("hdrh", "psutil"),
}
"""The modules of each extra."""

_LEAST_MEMORY_MB, _LEAST_DISK_MB = 500, 1000
_GPU = Path("/dev/nvidia0")

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One property of the machine; ``advice`` says what to do about it, "" for nothing."""

    status: Status
    subject: str
    finding: str
    advice: str = ""


@click.command()
@store_option
@json_option
def doctor(model_store: Path, as_json: bool) -> None:
    """Print what this machine can do, and what to do about each finding.

    The exit code is 1 if something keeps the server from starting.
    """
    findings = list(_findings(model_store))
    rows = [asdict(finding) for finding in findings]
    print_rows(rows if as_json else [_in_one_sentence(row) for row in rows], as_json=as_json)
    if any(finding.status == "problem" for finding in findings):
        sys.exit(1)


def _in_one_sentence(row: dict[str, str]) -> dict[str, str]:
    """Return the row of a table: the finding, with the advice after it."""
    advice = row.pop("advice")
    return row | {"finding": f"{row['finding']}; {advice}" if advice else row["finding"]}


def _findings(model_store: Path) -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", "cloze", f"{build()}, Python {python}")
    yield from _processor()
    yield from _runtime()
    yield from _extras()
    yield from _store(model_store)
    yield from _space(model_store)
    yield from _settings()


def _processor() -> Iterator[Finding]:
    from cloze.service.machine import available_cpus

    cores = f"{available_cpus()} cores for this process"
    yield Finding("ok", "processor", ", ".join([processor_name(), cores, *int8_instructions()]))
    if (reason := int8_advantage()) is not None:
        yield Finding(
            "ok",
            "precision",
            f"auto takes int8 on a CPU, which is faster than fp32 by {reason}",
            "export with --precision int8, so that bundles have it",
        )
    else:
        yield Finding("ok", "precision", "auto takes fp32 on a CPU: int8 would not be faster")


def _runtime() -> Iterator[Finding]:
    try:
        import onnxruntime
    except ModuleNotFoundError:
        command = install_command("cpu")
        yield Finding("problem", "onnxruntime", "not installed", f"{command} (or gpu, for CUDA)")
        return
    builds = [build for build in ("onnxruntime", "onnxruntime-gpu") if _is_installed(build)]
    if len(builds) > 1:
        advice = f"uninstall both, then: {install_command('cpu')}"
        yield Finding(
            "problem", "onnxruntime", f"{' and '.join(builds)} overwrite each other", advice
        )
        return
    providers = onnxruntime.get_available_providers()
    yield Finding("ok", "onnxruntime", f"{onnxruntime.__version__}, {', '.join(providers)}")
    has_gpu, can_use = _GPU.exists(), "CUDAExecutionProvider" in providers
    if has_gpu and not can_use:
        advice = f"uninstall onnxruntime, then: {install_command('gpu')}"
        yield Finding("note", "GPU", "there is one, but onnxruntime has no CUDA", advice)
    elif can_use and not has_gpu:
        yield Finding("note", "GPU", f"onnxruntime has CUDA, but there is no {_GPU}")
    else:
        yield Finding("ok", "GPU", "one or more" if has_gpu else "none")


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _extras() -> Iterator[Finding]:
    for extra, modules in _EXTRAS.items():
        missing = [module for module in modules if find_spec(module) is None]
        if missing:
            finding = f"cloze {extra} is not available: {', '.join(missing)}"
            yield Finding("note", extra, finding, install_command(extra))
        else:
            yield Finding("ok", extra, "installed")


def _store(root: Path) -> Iterator[Finding]:
    store = Store(root)
    # Without CLOZE_MODEL, a server opens all bundles, and needs one.
    status: Status = "note" if os.environ.get("CLOZE_MODEL") else "problem"
    try:
        references = store.references()
    except StoreError as error:
        yield Finding(status, "store", str(error), "let this user read the folder")
        return
    broken = []
    for reference in references:
        try:
            store.manifest(reference)
        except StoreError as error:
            broken.append(str(error))
    for problem in broken:
        yield Finding(status, "store", problem, "remove or restore the bundle")
    if not references:
        advice = "cloze export SOURCE --name NAME, or cloze serve --model ./path"
        yield Finding(status, "store", f"{root} has no bundle", advice)
    else:
        yield Finding("ok", "store", f"{root} has {', '.join(references)}")
    existing = _existing(root)
    if not os.access(existing, os.W_OK):
        advice = "set CLOZE_MODEL_STORE to a folder that you may write"
        yield Finding("note", "store", f"{root} is read-only: exports go elsewhere", advice)


def _space(root: Path) -> Iterator[Finding]:
    import psutil

    from cloze.service.machine import memory_limit, memory_used

    available, limit, used = psutil.virtual_memory().available, memory_limit(), memory_used()
    of_limit = ""
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
        of_limit = f" of the {limit // 1_000_000:,} MB that the container may use"
    available_mb = available // 1_000_000
    low = available_mb < _LEAST_MEMORY_MB
    advice = "serve fewer models, or int8 ones" if low else ""
    finding = f"{available_mb:,} MB available{of_limit}"
    yield Finding("note" if low else "ok", "memory", finding, advice)
    for name, folder in (
        ("disk of the store", root),
        ("disk of temporary files", Path(tempfile.gettempdir())),
    ):
        existing = _existing(folder)
        free = shutil.disk_usage(existing).free // 1_000_000
        low = free < _LEAST_DISK_MB
        advice = "an export needs up to three times the checkpoint" if low else ""
        yield Finding("note" if low else "ok", name, f"{free:,} MB free in {existing}", advice)


def _existing(path: Path) -> Path:
    """Return the path, or the closest parent that exists as far as this user can see."""
    return next(parent for parent in (path, *path.parents) if os.access(parent, os.F_OK))


def _settings() -> Iterator[Finding]:
    from cloze.service.errors import StartupError
    from cloze.service.settings import load_settings, unknown_variables

    for name in unknown_variables():
        yield Finding("note", "settings", f"{name} is not a setting", "see cloze serve --help")
    try:
        settings = load_settings()
    except StartupError as error:
        yield Finding("problem", "settings", str(error), "correct the variable")
        return
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", settings.port)) == 0 and settings.port:
            yield Finding("note", "port", f"something listens on {settings.port}", "set CLOZE_PORT")
        else:
            yield Finding("ok", "port", f"{settings.port} is free")
