"""An engine that runs a bundle with onnxruntime.

The engine chooses one of the bundle's graphs, checks its golden outputs, and then runs batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cloze.model_store import Bundle, Manifest
from cloze.model_store.batch import BatchCodec, Encoding, HeadOutputs
from cloze.model_store.goldens import Golden, read_goldens
from cloze.model_store.graph_checks import check_graph
from cloze.model_store.installation import install_command
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Graph, Parity, Precision
from cloze.model_store.parity import output_errors
from cloze.model_store.processor import INT8_NAMES, int8_advantage
from cloze.service.core import Device, RequestedPrecision, StartupError, first_line
from cloze.service.engine.session import (
    CUDA,
    CpuSession,
    Session,
    cpu_session,
    cuda_session,
    providers,
)

OpenSession = Callable[[Bundle, Graph], Session]
"""Opens a session with a graph of a bundle."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The resources of a session.

    Attributes:
        device_id: index of the GPU.
        gpu_memory_limit: most bytes of the GPU's memory to use; 0 sets no limit.
        threads: intra-op threads per run on a CPU.
        alone_threads: the same for a batch that runs alone; see `cpu_session`.
    """

    device_id: int = 0
    gpu_memory_limit: int = 0
    threads: int = 1
    alone_threads: int = 0


_DEFAULT_OPTIONS = SessionOptions()


@dataclass(frozen=True, slots=True)
class _Choice:
    """The graph to run.

    Attributes:
        graph: one of a bundle's graphs.
        parity: the golden outputs of the graph and their tolerance.
        reason: why this graph was chosen, for the log.
    """

    graph: Graph
    parity: Parity
    reason: str


@dataclass(frozen=True, slots=True)
class _OpenGraph:
    """A chosen graph with its session on a device."""

    choice: _Choice
    device: Device
    session: Session


class OnnxEngine:
    """Runs one graph of a bundle, after a check of the graph's golden outputs.

    Args:
        bundle: an opened, hence verified, bundle.
        device: the device to run on. If ``cuda`` is requested and does not come up, the engine
            raises; it never falls back to the CPU. ``auto`` does fall back to the CPU.
        precision: the precision of the graph to run. ``auto`` selects fp16 on CUDA, and int8 on a
            processor that runs it faster; see `int8_advantage`.
        options: the resources of the session.
        open_session: opens the session instead of the device's runtime, for tests of graphs that
            the local runtime cannot run.

    Raises:
        StartupError: the device is missing, the bundle lacks the precision, the graph is not what
            the manifest describes or does not load, or the golden outputs differ.
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
        if open_session is None:
            opened = _open_on_device(bundle, device, precision, options)
        else:
            opened = _open(bundle, device, precision, open_session)
        graph, parity = opened.choice.graph, opened.choice.parity
        session = opened.session
        self._session = session
        self._alone = session.alone if isinstance(session, CpuSession) else session
        self.device = opened.device
        self.precision = graph.precision
        self.reason = opened.choice.reason
        self.supports_varlen = graph.layout is Layout.PACKED
        self._codec = BatchCodec(bundle.manifest.graph_spec(graph.layout))
        self._tolerance = parity.tolerance
        self._goldens = _read_goldens(bundle, opened.choice)
        try:
            for golden in self._goldens:
                self._check(golden, self._session)
            if self._alone is not self._session:
                self._check(self._goldens[0], self._alone)
        except Exception as error:  # the runtime's errors have no common type
            raise StartupError(
                f"bundle {bundle.manifest.reference} does not reproduce its golden outputs: "
                f"{first_line(error)}"
            ) from error

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        """Return the results of each encoding; see `Engine.run`."""
        names = self._codec.outputs(batch)
        session = self._alone if alone else self._session
        outputs = session.run(names, self._codec.pack(batch))
        return self._codec.unpack(batch, dict(zip(names, outputs, strict=True)))

    def probe(self) -> None:
        """Check the first golden batch; see `Engine.probe`."""
        self._check(self._goldens[0], self._session)

    def _check(self, golden: Golden, session: Session) -> None:
        """Run a golden batch; raise unless each output is within the manifest's tolerance."""
        names = list(golden.outputs)
        outputs = dict(zip(names, session.run(names, golden.feeds), strict=True))
        for name, error in output_errors(outputs, golden.outputs, self._tolerance).items():
            if error > self._tolerance:
                raise ValueError(f"{name} is off by {error:.1e}, more than {self._tolerance:.0e}")


def _read_goldens(bundle: Bundle, choice: _Choice) -> tuple[Golden, ...]:
    file = choice.parity.golden_file
    try:
        return read_goldens(bundle, file, choice.graph.layout)
    except (OSError, ValueError) as error:
        raise StartupError(
            f"bundle {bundle.manifest.reference}: {file} {first_line(error)}"
        ) from error


def _open_on_device(
    bundle: Bundle, requested: Device, precision: RequestedPrecision, options: SessionOptions
) -> _OpenGraph:
    """Open a graph on the requested device; ``auto`` falls back to the CPU without a GPU."""
    device = _available_device(requested)
    try:
        return _open(bundle, device, precision, _session_opener(device, options))
    except StartupError as error:
        if requested is not Device.AUTO or device is Device.CPU:
            raise
        opened = _open(bundle, Device.CPU, precision, _session_opener(Device.CPU, options))
        reason = f"{opened.choice.reason}; {error}"
        return replace(opened, choice=replace(opened.choice, reason=reason))


def _available_device(requested: Device) -> Device:
    available = providers()
    if requested is Device.CUDA and CUDA not in available:
        raise StartupError(
            f"device cuda was asked for, but this onnxruntime has only {', '.join(available)}; "
            f"uninstall onnxruntime, then: {install_command('gpu')}"
        )
    return Device.CPU if requested is Device.CPU or CUDA not in available else Device.CUDA


def _session_opener(device: Device, options: SessionOptions) -> OpenSession:
    def open_session(bundle: Bundle, graph: Graph) -> Session:
        file = bundle.file(graph.file)
        if device is Device.CUDA:
            return cuda_session(file, options.device_id, options.gpu_memory_limit)
        return cpu_session(file, options.threads, options.alone_threads)

    return open_session


def _open(
    bundle: Bundle, device: Device, precision: RequestedPrecision, open_session: OpenSession
) -> _OpenGraph:
    """Choose a graph, check it against the manifest and open its session.

    Raises:
        StartupError: the bundle lacks the precision, or the graph does not load.
    """
    choice = _choose_graph(bundle.manifest, device, precision)
    try:
        check_graph(bundle, choice.graph)
        return _OpenGraph(choice, device, open_session(bundle, choice.graph))
    except StartupError:
        raise
    except Exception as error:  # the runtime's errors have no common type
        raise StartupError(
            f"bundle {bundle.manifest.reference}: its graph does not load: {first_line(error)}"
        ) from error


def _choose_graph(manifest: Manifest, device: Device, requested: RequestedPrecision) -> _Choice:
    if requested is Precision.FP32:
        return _Choice(manifest.graph, manifest.parity, "as asked")
    if device is Device.CUDA:
        return _choose_for_cuda(manifest, requested)
    return _choose_for_cpu(manifest, requested)


def _choose_for_cpu(manifest: Manifest, requested: RequestedPrecision) -> _Choice:
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
        return _Choice(*fp32, "since the bundle has nothing else")
    advantage = int8_advantage()
    lacking = f"the processor has none of {INT8_NAMES}, nor avx2 without avx512f"
    if requested is Precision.INT8:
        reason = "as asked" if advantage else f"as asked, though {lacking}, so fp32 may be faster"
        return _Choice(int8.graph, int8.parity, reason)
    if advantage is None:
        return _Choice(*fp32, f"since {lacking}")
    reason = f"since the processor has {advantage} and the bundle's gate was passed"
    return _Choice(int8.graph, int8.parity, reason)


def _choose_for_cuda(manifest: Manifest, requested: RequestedPrecision) -> _Choice:
    if requested is Precision.INT8:
        raise StartupError(
            "precision int8 was asked for, which runs on a CPU only; set the device to cpu"
        )
    if (fp16 := manifest.fp16) is not None:
        reason = "since the device is a GPU and the bundle's gate was passed"
        if requested is Precision.FP16:
            reason = "as asked"
        return _Choice(fp16.graph, fp16.parity, reason)
    if requested is Precision.FP16:
        raise StartupError(
            f"bundle {manifest.reference} has no fp16 graph; export it with --precision fp16"
        )
    reason = "since the bundle has no fp16 graph; export it with --precision fp16 for speed"
    return _Choice(manifest.graph, manifest.parity, reason)
