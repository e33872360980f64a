"""Chooses which graph of a bundle a device runs, and checks that its weights fit into the memory.

The module does not depend on onnxruntime.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloze.model_store import Bundle, Manifest
from cloze.model_store.limits import MAX_GRAPH_BYTES
from cloze.model_store.manifest import Graph, Parity, Precision
from cloze.model_store.onnx_file import parse_onnx
from cloze.model_store.plain_files import read_plain
from cloze.model_store.processor import INT8_NAMES, int8_advantage
from cloze.service.core import Device, RequestedPrecision, StartupError

CONTROL_GROUP: Final = Path("/sys/fs/cgroup")
"""Folder in which Linux publishes the limits of the process's control group."""

MACHINE_MEMORY: Final = Path("/proc/meminfo")

_PROCESS_BYTES: Final = 70_000_000
"""Memory of a server without models; measured: 84 MB with the runtime loaded."""


@dataclass(frozen=True, slots=True)
class GraphChoice:
    """The graph to run, its golden outputs, and why it was chosen, for the log."""

    graph: Graph
    parity: Parity
    reason: str


def choose_graph(manifest: Manifest, device: Device, requested: RequestedPrecision) -> GraphChoice:
    """Return the graph that a device, the CPU or CUDA, runs in a precision.

    ``auto`` selects fp16 on CUDA, and int8 on a processor that runs it faster; see
    `int8_advantage`.

    Raises:
        StartupError: the bundle or the device lacks the precision.
    """
    if requested is Precision.FP32:
        return GraphChoice(manifest.graph, manifest.parity, "as asked")
    if device is Device.CUDA:
        return _choose_for_cuda(manifest, requested)
    return _choose_for_cpu(manifest, requested)


def _choose_for_cpu(manifest: Manifest, requested: RequestedPrecision) -> GraphChoice:
    if requested is Precision.FP16:
        raise StartupError(
            "precision fp16 was asked for, which runs on CUDA only; set the device to cuda"
        )
    fp32, int8 = (manifest.graph, manifest.parity), manifest.int8
    if int8 is None:
        if requested is Precision.INT8:
            raise StartupError(
                f"bundle {manifest.reference} has no int8 graph; export it with --precision int8"
            )
        return GraphChoice(*fp32, "since the bundle has nothing else")
    advantage = int8_advantage()
    lacking = f"the processor has none of {INT8_NAMES}, nor avx2 without avx512f"
    if requested is Precision.INT8:
        reason = "as asked" if advantage else f"as asked, though {lacking}, so fp32 may be faster"
        return GraphChoice(int8.graph, int8.parity, reason)
    if advantage is None:
        return GraphChoice(*fp32, f"since {lacking}")
    reason = f"since the processor has {advantage} and the bundle's gate was passed"
    return GraphChoice(int8.graph, int8.parity, reason)


def _choose_for_cuda(manifest: Manifest, requested: RequestedPrecision) -> GraphChoice:
    if requested is Precision.INT8:
        raise StartupError(
            "precision int8 was asked for, which runs on a CPU only; set the device to cpu"
        )
    if (fp16 := manifest.fp16) is not None:
        reason = "since the device is a GPU and the bundle's gate was passed"
        if requested is Precision.FP16:
            reason = "as asked"
        return GraphChoice(fp16.graph, fp16.parity, reason)
    if requested is Precision.FP16:
        raise StartupError(
            f"bundle {manifest.reference} has no fp16 graph; export it with --precision fp16"
        )
    reason = "since the bundle has no fp16 graph; export it with --precision fp16 for speed"
    return GraphChoice(manifest.graph, manifest.parity, reason)


def memory_limit(control_group: Path = CONTROL_GROUP) -> int | None:
    """Return the bytes that this process's control group (version 2 or 1) may use; None: no limit.

    A container is a control group.
    """
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (control_group / name).read_text().strip()
        except OSError:
            continue
        # Version 1 has a huge number where there is no limit.
        return int(text) if text.isdigit() and int(text) < 2**60 else None
    return None


def memory_used(control_group: Path = CONTROL_GROUP) -> int | None:
    """Return the bytes that count towards `memory_limit`; None if Linux does not say.

    Pages of files that the kernel can drop at once are left out, as the kubelet does.
    """
    for usage, stat, droppable in (
        ("memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            used = int((control_group / usage).read_text())
            lines = (control_group / stat).read_text().splitlines()
        except OSError:
            continue
        values = dict(line.split() for line in lines)
        return max(0, used - int(values.get(droppable, 0)))
    return None


def memory_state(
    control_group: Path = CONTROL_GROUP, machine: Path = MACHINE_MEMORY
) -> tuple[int, int] | None:
    """Return the bytes in use and the most bytes: of the control group, or else of the machine.

    None: the system is not Linux.
    """
    limit, used = memory_limit(control_group), memory_used(control_group)
    if limit is not None and used is not None:
        return used, limit
    with suppress(OSError):
        values = dict(line.split()[:2] for line in machine.read_text().splitlines())
        total = int(values["MemTotal:"])
        return 1024 * (total - int(values["MemAvailable:"])), 1024 * total
    return None


def check_memory(
    bundles: Iterable[Bundle],
    limit: int | None,
    device: Device,
    precision: RequestedPrecision,
    adapters: Mapping[str, int] | None = None,
) -> None:
    """Check that the weights of bundles, and their adapters, fit into the memory.

    Without the check, the kernel kills the process while it opens a model, and nothing says why.
    The weights of the graphs that run are a lower bound of the memory, so nothing is refused that
    might run.

    Args:
        bundles: the bundles to serve.
        limit: most bytes of the process; None: there is no limit.
        device: the device to run on.
        precision: the precision to run in.
        adapters: the bytes of adapters that may be loaded together, by the full name of their base.

    Raises:
        StartupError: the process with its weights needs more.
    """
    if limit is None:
        return
    weights = {b.manifest.reference: least_weight_bytes(b, device, precision) for b in bundles}
    weights |= {f"the adapters of {base}": size for base, size in (adapters or {}).items()}
    needed = _PROCESS_BYTES + sum(weights.values())
    if needed > limit:
        shown = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in weights.items())
        lower = ", or lower CLOZE_ADAPTER_MEMORY_MB" if adapters else ""
        raise StartupError(
            f"the memory limit of this process is {limit / 1e6:.0f} MB, and the models need at "
            f"least {needed / 1e6:.0f} MB ({shown}); raise it, or serve fewer models{lower}"
        )


def least_weight_bytes(bundle: Bundle, device: Device, precision: RequestedPrecision) -> int:
    """Return the bytes that the graph that runs reads from files of weights.

    For the device ``auto``, the result is the least of all devices.
    """
    devices = (Device.CPU, Device.CUDA) if device is Device.AUTO else (device,)
    sizes = []
    for each in devices:
        try:
            graph = choose_graph(bundle.manifest, each, precision).graph
            weights = parse_onnx(read_plain(bundle.file(graph.file), MAX_GRAPH_BYTES)).weights
        except (StartupError, OSError, ValueError):
            continue  # the engine says what is wrong, or the device is another
        sizes.append(sum(one.size for one in set(weights.values()) if one.file is not None))
    return min(sizes, default=0)
