"""Refuses a start for which the memory limit of the process is certainly too small.

Without the check, the kernel kills the process while it opens a model, and nothing says why.
"""

from collections.abc import Iterable
from typing import Final

from cloze.model_store import Bundle
from cloze.model_store.limits import MAX_GRAPH_BYTES
from cloze.model_store.onnx_file import parse_onnx
from cloze.model_store.plain_files import read_plain
from cloze.service.core import Device, RequestedPrecision, StartupError
from cloze.service.graph_choice import choose_graph

_PROCESS_BYTES: Final = 70_000_000
"""Memory of a server without models; measured: 84 MB with the runtime loaded."""


def check_memory(
    bundles: Iterable[Bundle], limit: int | None, device: Device, precision: RequestedPrecision
) -> None:
    """Check that the weights of bundles fit into the memory.

    The weights of the graphs that run are a lower bound of the memory, so nothing is refused that
    might run.

    Args:
        bundles: the bundles to serve.
        limit: most bytes of the process; None: there is no limit.
        device: the device to run on.
        precision: the precision to run in.

    Raises:
        StartupError: the process with its weights needs more.
    """
    if limit is None:
        return
    weights = {b.manifest.reference: least_weight_bytes(b, device, precision) for b in bundles}
    needed = _PROCESS_BYTES + sum(weights.values())
    if needed > limit:
        shown = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in weights.items())
        raise StartupError(
            f"the memory limit of this process is {limit / 1e6:.0f} MB, and the models need at "
            f"least {needed / 1e6:.0f} MB ({shown}); raise it, or serve fewer models"
        )


def least_weight_bytes(bundle: Bundle, device: Device, precision: RequestedPrecision) -> int:
    """Return the bytes that the graph that runs reads from files of weights.

    Args:
        bundle: the bundle to serve.
        device: the device to run on; for ``auto``, the result is the least of all devices.
        precision: the precision to run in.
    """
    devices = (Device.CPU, Device.CUDA) if device is Device.AUTO else (device,)
    sizes = []
    for each in devices:
        try:
            graph = choose_graph(bundle.manifest, each, precision).graph
            weights = parse_onnx(read_plain(bundle.file(graph.file), MAX_GRAPH_BYTES)).weights
        except (StartupError, OSError, ValueError):
            continue  # the engine says what is wrong, or the device is another
        sizes.append(sum(weight.size for weight in weights.values() if weight.file is not None))
    return min(sizes, default=0)
