"""Chooses which of a bundle's graphs a device runs. Does not depend on onnxruntime."""

from dataclasses import dataclass

from cloze.model_store import Manifest
from cloze.model_store.manifest import Graph, Parity, Precision
from cloze.model_store.processor import INT8_NAMES, int8_advantage
from cloze.service.core import Device, RequestedPrecision, StartupError


@dataclass(frozen=True, slots=True)
class GraphChoice:
    """The graph to run.

    Attributes:
        graph: one of a bundle's graphs.
        parity: the golden outputs of the graph and their tolerance.
        reason: why this graph was chosen, for the log.
    """

    graph: Graph
    parity: Parity
    reason: str


def choose_graph(manifest: Manifest, device: Device, requested: RequestedPrecision) -> GraphChoice:
    """Return the graph that a device runs in a precision.

    Args:
        manifest: of the bundle.
        device: the CPU or CUDA.
        requested: the precision of the graph. ``auto`` selects fp16 on CUDA, and int8 on a
            processor that runs it faster; see `int8_advantage`.

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
