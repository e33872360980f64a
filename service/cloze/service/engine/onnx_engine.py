"""An engine that checks the golden outputs of a bundle's graph, and then runs batches with it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from cloze.model_store import Bundle
from cloze.model_store.adapter_section import HIDDEN_ROWS
from cloze.model_store.batch import BatchCodec, Encoding, HeadOutputs
from cloze.model_store.error_lines import first_line
from cloze.model_store.goldens import Golden, read_goldens
from cloze.model_store.graph_checks import check_graph
from cloze.model_store.installation import install_command
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Graph, Precision
from cloze.model_store.parity import output_errors
from cloze.model_store.processor import int8_instructions
from cloze.model_store.tensors import INPUT_IDS
from cloze.service.core import Device, RequestedPrecision
from cloze.service.engine.adapters import AdaptedRuns, LoadedAdapters
from cloze.service.engine.graph_choice import GraphChoice, choose_graph
from cloze.service.engine.session import (
    CUDA,
    CpuSession,
    Session,
    cpu_session,
    cuda_session,
    providers,
)
from cloze.service.errors import StartupError

log = logging.getLogger("cloze")

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
        adapter_bytes: most bytes of loaded adapters; 0: the engine takes no adapters.
    """

    device_id: int = 0
    gpu_memory_limit: int = 0
    threads: int = 1
    alone_threads: int = 0
    adapter_bytes: int = 0


_DEFAULT_OPTIONS = SessionOptions()


class OnnxEngine:
    """Runs one graph of a bundle, after a check of the graph's golden outputs.

    Args:
        bundle: an opened, hence verified, bundle.
        device: the device to run on. If ``cuda`` is requested and does not come up, the engine
            raises; it never falls back to the CPU. ``auto`` does fall back to the CPU.
        precision: see `choose_graph`.
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
            device, choice, session = _open_on_device(bundle, device, precision, options)
        else:
            choice, session = _open(bundle, device, precision, open_session)
        self._session = session
        self._alone = session  # until `_try_alone`
        self._untried = session.alone if isinstance(session, CpuSession) else None
        self.device = device
        self.precision = choice.graph.precision
        self.reason = choice.reason
        self.supports_varlen = choice.graph.layout is Layout.PACKED
        self._codec = BatchCodec(bundle.manifest.graph_spec(choice.graph.layout))
        self._tolerance = choice.parity.tolerance
        reference, file = bundle.manifest.reference, choice.parity.golden_file
        try:
            self._goldens = read_goldens(bundle, file, choice.graph.layout)
        except (OSError, ValueError) as error:
            raise StartupError(f"bundle {reference}: {file} {first_line(error)}") from error
        self.adapters: LoadedAdapters | None = None
        self._adapted: AdaptedRuns | None = None
        if isinstance(session, CpuSession) and session.adapted is not None:
            assert bundle.manifest.adapters is not None
            self.adapters = LoadedAdapters(bundle.manifest.adapters, options.adapter_bytes)
            self._adapted = AdaptedRuns(self.adapters, self._codec, session.adapted)
        try:
            for golden in self._goldens:
                self._check(golden, self._session)
            if self._adapted is not None:
                golden = self._goldens[0]
                sequences = len(golden.feeds[INPUT_IDS.name])
                feeds = golden.feeds | self._adapted.feeds([None] * sequences)
                feeds[HIDDEN_ROWS.name] = np.zeros(0, np.int32)
                self._check(replace(golden, feeds=feeds), self._adapted.sessions)
        except Exception as error:  # the runtime's errors have no common type
            raise StartupError(
                f"bundle {reference} does not reproduce its golden outputs: {first_line(error)}"
            ) from error

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        """Return the results of each encoding; see `Engine.run`."""
        if self._adapted is not None and any(encoding.adapter for encoding in batch):
            return self._adapted.run(batch, alone=alone)
        if alone and self._untried is not None:
            self._try_alone(self._untried)
        packed = self._codec.pack(batch)
        session = self._alone if alone else self._session
        outputs = session.run(packed.outputs, packed.feeds)
        for output in outputs:
            if output.dtype.kind == "f" and not np.isfinite(output).all():
                raise FloatingPointError  # JSON would have null for the number that overflowed
            output.flags.writeable = False  # equal sequences share their results
        return packed.unpack(dict(zip(packed.outputs, outputs, strict=True)))

    def probe(self) -> None:
        """Check the first golden batch; see `Engine.probe`."""
        self._check(self._goldens[0], self._session)

    def _try_alone(self, session: Session) -> None:
        """Run lone batches in their own session from now on, if it agrees with a golden batch.

        The session maps the weights a second time. An idle server, whose memory is read most often,
        has not yet used it.
        """
        self._untried = None
        try:
            self._check(self._goldens[0], session)
        except Exception as error:  # the runtime's errors have no common type
            log.error("a lone request runs on one core: the golden outputs: %s", first_line(error))
            return
        self._alone = session

    def _check(self, golden: Golden, session: Session) -> None:
        """Run a golden batch; raise unless each output is within the manifest's tolerance."""
        names = list(golden.outputs)
        outputs = dict(zip(names, session.run(names, golden.feeds), strict=True))
        for name, error in output_errors(outputs, golden.outputs, self._tolerance).items():
            if error > self._tolerance:
                raise ValueError(f"{name} is off by {error:.1e}, more than {self._tolerance:.0e}")


def _open_on_device(
    bundle: Bundle, requested: Device, precision: RequestedPrecision, options: SessionOptions
) -> tuple[Device, GraphChoice, Session]:
    """Open a graph on the requested device; ``auto`` falls back to the CPU without a GPU."""
    available = providers()
    if requested is Device.CUDA and CUDA not in available:
        raise StartupError(
            f"device cuda was asked for, but this onnxruntime has only {', '.join(available)}; "
            f"uninstall onnxruntime, then: {install_command('gpu')}"
        )
    device = Device.CPU if requested is Device.CPU or CUDA not in available else Device.CUDA
    try:
        return device, *_open(bundle, device, precision, partial(_open_session, device, options))
    except StartupError as error:
        if requested is not Device.AUTO or device is Device.CPU:
            raise
        on_cpu = partial(_open_session, Device.CPU, options)
        choice, session = _open(bundle, Device.CPU, precision, on_cpu)
        return Device.CPU, replace(choice, reason=f"{choice.reason}; {error}"), session


def _open_session(device: Device, options: SessionOptions, bundle: Bundle, graph: Graph) -> Session:
    file = bundle.file(graph.file)
    adapters = bundle.manifest.adapters if options.adapter_bytes else None
    if device is Device.CUDA:
        if adapters is not None:
            raise StartupError("adapters run on a CPU only: set device to cpu")
        return cuda_session(file, options.device_id, options.gpu_memory_limit)
    adapted = None
    if adapters is not None:
        check_graph(bundle, adapters.graph_of(graph.precision), adapters)
        adapted = bundle.file(adapters.graph_of(graph.precision).file)
    return cpu_session(file, options.threads, options.alone_threads, adapted)


def _open(
    bundle: Bundle, device: Device, precision: RequestedPrecision, open_session: OpenSession
) -> tuple[GraphChoice, Session]:
    """Choose a graph, check it against the manifest and open its session.

    Bundles of older versions may have an int8 graph that no processor without int8 instructions
    can open (`GraphBuilder.own` of `cloze.export`). ``auto`` then runs fp32.
    """
    choice = choose_graph(bundle.manifest, device, precision)
    try:
        check_graph(bundle, choice.graph)
        return choice, open_session(bundle, choice.graph)
    except StartupError:
        raise
    except Exception as error:  # the runtime's errors have no common type
        problem = f"its graph does not load: {first_line(error)}"
        if choice.graph.precision is Precision.INT8 and not int8_instructions():
            problem += "; export the model again if an older version exported it"
            if precision == "auto":
                choice, session = _open(bundle, device, Precision.FP32, open_session)
                return replace(choice, reason=f"since {problem}"), session
        raise StartupError(f"bundle {bundle.manifest.reference}: {problem}") from error
