"""Run a bundle: choose its graph, check its golden outputs, then run batches.

Knows no queue, no text and no HTTP.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from model_store import Bundle, Manifest
from model_store.batch import BatchCodec, Encoding, HeadOutputs
from model_store.heads import HEADS
from model_store.layouts import Layout
from model_store.manifest import Graph, Parity, Precision
from model_store.parity import errors
from model_store.processor import INT8_NAMES, int8_instructions
from model_store.tensors import TRUNK_INPUTS
from service.core import Device, RequestedPrecision, StartupError, first_line
from service.engine.session import CUDA, Session, cpu_session, cuda_session, providers

OpenSession = Callable[[Bundle, Graph], Session]

_DTYPES = {
    tensor.name: tensor.numpy_dtype
    for tensors in (TRUNK_INPUTS, *(head.inputs for head in HEADS.values()))
    for tensor in tensors
}


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a session is opened.

    Attributes:
        device_id: which GPU.
        gpu_memory_limit: bytes; 0: all of the GPU's memory.
        threads: per run on a CPU.
    """

    device_id: int = 0
    gpu_memory_limit: int = 0
    threads: int = 1


_DEFAULT_OPTIONS = SessionOptions()


class OnnxEngine:
    """A session on one of a bundle's graphs; its golden outputs are checked before it is used.

    Args:
        bundle: an opened, hence verified, bundle.
        device: where to run; CUDA that does not come up is an error, never a silent CPU.
        precision: which graph to run; ``auto`` takes fp16 on CUDA, and int8 on a processor that
            has instructions for int8.
        options: how the session is opened.
        open_session: replaces the device's own session, for a graph that no local runtime runs.

    Raises:
        StartupError: the device is missing, the bundle lacks the precision, the graph does not
            load, or the golden outputs differ.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: Device = Device.AUTO,
        precision: RequestedPrecision = Precision.FP32,
        *,
        options: SessionOptions = _DEFAULT_OPTIONS,
        open_session: OpenSession | None = None,
    ) -> None:
        manifest = bundle.manifest
        self._name = manifest.reference

        def on_device(bundle: Bundle, graph: Graph) -> Session:
            file = bundle.file(graph.file)
            if self.device is Device.CUDA:
                return cuda_session(file, options.device_id, options.gpu_memory_limit)
            return cpu_session(file, options.threads)

        self.device = _device(device) if open_session is None else device
        try:
            graph, parity, self.reason = _choose_graph(manifest, self.device, precision)
            self._session = _open(bundle, graph, open_session or on_device)
        except StartupError as error:
            if device is not Device.AUTO or self.device is Device.CPU:
                raise
            self.device = Device.CPU  # auto, and the GPU did not come up
            graph, parity, self.reason = _choose_graph(manifest, self.device, precision)
            self._session = _open(bundle, graph, on_device)
            self.reason += f"; {error}"
        self.precision = graph.precision
        self.supports_varlen = graph.layout is Layout.PACKED
        self._codec = BatchCodec(manifest.graph_spec(graph.layout))
        self._tolerance = parity.tolerance
        self._goldens = json.loads(bundle.file(parity.golden_file).read_bytes())
        try:
            for golden in self._goldens:
                self._check(golden)
        except Exception as error:
            raise StartupError(
                f"bundle {self._name} does not reproduce its golden outputs: {first_line(error)}"
            ) from error

    def run(self, batch: Sequence[Encoding]) -> list[HeadOutputs]:
        """Return each encoding's results; see `Engine.run`."""
        names = self._codec.outputs(batch)
        outputs = self._session.run(names, self._codec.pack(batch))
        return self._codec.unpack(batch, dict(zip(names, outputs, strict=True)))

    def probe(self) -> None:
        """Check the first golden batch; see `Engine.probe`."""
        self._check(self._goldens[0])

    def _check(self, golden: dict[str, dict[str, Any]]) -> None:
        """Run a golden batch; raise unless each output is within the manifest's tolerance."""
        feeds = {name: np.array(values, _DTYPES[name]) for name, values in golden["feeds"].items()}
        expected = {name: np.array(values) for name, values in golden["outputs"].items()}
        outputs = dict(zip(expected, self._session.run(list(expected), feeds), strict=True))
        for name, error in errors(outputs, expected, self._tolerance).items():
            if error > self._tolerance:
                raise ValueError(f"{name} is off by {error:.1e}, more than {self._tolerance:.0e}")


def _device(asked: Device) -> Device:
    there = providers()
    if asked is Device.CUDA and CUDA not in there:
        raise StartupError(
            f"device cuda was asked for, but this onnxruntime has only {', '.join(there)}; install cloze[gpu]"
        )
    return Device.CPU if asked is Device.CPU or CUDA not in there else Device.CUDA


def _choose_graph(
    manifest: Manifest, device: Device, asked: RequestedPrecision
) -> tuple[Graph, Parity, str]:
    """The graph to run, its parity, and why it is this one."""
    fp32 = manifest.graph, manifest.parity
    if asked is Precision.FP32:
        return *fp32, "as asked"
    if device is Device.CUDA:
        return _choose_for_cuda(manifest, asked)
    if asked is Precision.FP16:
        raise StartupError(
            "precision fp16 was asked for, which runs on CUDA only; set the device to cuda"
        )
    if manifest.int8 is None:
        if asked is Precision.INT8:
            raise StartupError(
                f"bundle {manifest.reference} has no int8 graph; export it with --precision int8"
            )
        return *fp32, "since the bundle has nothing else"
    int8 = manifest.int8.graph, manifest.int8.parity
    if asked is Precision.INT8:
        return *int8, "as asked"
    if there := int8_instructions():
        return *int8, f"since the processor has {', '.join(there)} and the bundle's gate was passed"
    return *fp32, f"since the processor has none of {INT8_NAMES}"


def _choose_for_cuda(manifest: Manifest, asked: RequestedPrecision) -> tuple[Graph, Parity, str]:
    if asked is Precision.INT8:
        raise StartupError(
            "precision int8 was asked for, which runs on a CPU only; set the device to cpu"
        )
    if manifest.fp16 is not None:
        reason = (
            "as asked"
            if asked is Precision.FP16
            else "since the device is a GPU and the bundle's gate was passed"
        )
        return manifest.fp16.graph, manifest.fp16.parity, reason
    if asked is Precision.FP16:
        raise StartupError(
            f"bundle {manifest.reference} has no fp16 graph; export it with --precision fp16"
        )
    return (
        manifest.graph,
        manifest.parity,
        "since the bundle has no fp16 graph; export it with --precision fp16 for speed",
    )


def _open(bundle: Bundle, graph: Graph, open_session: OpenSession) -> Session:
    try:
        return open_session(bundle, graph)
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(
            f"bundle {bundle.manifest.reference}: its graph does not load: {first_line(error)}"
        ) from error
