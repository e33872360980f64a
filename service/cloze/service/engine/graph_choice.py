"""Chooses which graph of a bundle a device runs.

The module does not depend on onnxruntime.
"""

from contextlib import suppress
from dataclasses import dataclass

from cloze.model_store import Bundle, Manifest
from cloze.model_store.limits import MAX_GRAPH_BYTES
from cloze.model_store.manifest import Graph, Parity, Precision
from cloze.model_store.onnx_file import parse_onnx
from cloze.model_store.plain_files import read_plain
from cloze.model_store.processor import INT8_NAMES, int8_advantage
from cloze.service.core import Device, RequestedPrecision
from cloze.service.errors import StartupError


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
    fp32 = (manifest.graph, manifest.parity)
    if requested is Precision.FP32:
        return GraphChoice(*fp32, "as asked")
    on_cuda = device is Device.CUDA
    if requested is (Precision.INT8 if on_cuda else Precision.FP16):
        runs_on, other = ("a CPU", Device.CPU) if on_cuda else ("CUDA", Device.CUDA)
        raise StartupError(
            f"precision {requested} was asked for, which runs on {runs_on} only; set the device to "
            f"{other}"
        )
    fast = Precision.FP16 if on_cuda else Precision.INT8
    fast_graph, is_asked = manifest.fp16 if on_cuda else manifest.int8, requested is fast
    if fast_graph is None:
        if is_asked:
            raise StartupError(
                f"bundle {manifest.reference} has no {fast} graph; "
                f"export it with --precision {fast}"
            )
        reason = "since the bundle has no fp16 graph; export it with --precision fp16 for speed"
        return GraphChoice(*fp32, reason if on_cuda else "since the bundle has nothing else")
    advantage = "a GPU" if on_cuda else int8_advantage()
    lacking = f"the processor has none of {INT8_NAMES}, nor avx2 without avx512f"
    if advantage is None and not is_asked:
        return GraphChoice(*fp32, f"since {lacking}")
    if is_asked:
        reason = "as asked" if advantage else f"as asked, though {lacking}, so fp32 may be faster"
    else:
        has = "device is" if on_cuda else "processor has"
        reason = f"since the {has} {advantage} and the bundle's gate was passed"
    return GraphChoice(fast_graph.graph, fast_graph.parity, reason)


def least_weight_bytes(bundle: Bundle, device: Device, precision: RequestedPrecision) -> int:
    """Return the bytes that the graph that runs reads from files of weights, a lower bound.

    For the device ``auto``, the result is the least of all devices.
    """
    devices = (Device.CPU, Device.CUDA) if device is Device.AUTO else (device,)
    sizes = []
    for each in devices:
        with suppress(StartupError, OSError, ValueError):  # the engine says what is wrong
            graph = choose_graph(bundle.manifest, each, precision).graph
            weights = parse_onnx(read_plain(bundle.file(graph.file), MAX_GRAPH_BYTES)).weights
            sizes.append(sum(one.size for one in set(weights.values()) if one.file is not None))
    return min(sizes, default=0)
