"""Measures a device in one run of bounded time: engines of several sizes, servers, and torch.

On a CPU, a test runs the module. On a card, the module has never run.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cloze.bench.errors import BenchError
from cloze.bench.one_size import SQUAD, SizeBenchmark, SizeOptions, peak_flops
from cloze.bench.result import Cell, ServerStart, Turn
from cloze.bench.run import Plan, Report, measure
from cloze.bench.servers import MeasuredServer
from cloze.bench.sizes import squad_lengths
from cloze.bench.subjects import EngineAlone, MeasuredModel, cloze_server
from cloze.bench.texts import make_texts, words_of
from cloze.model_store import Bundle
from cloze.model_store.error_lines import first_line
from cloze.service.core import Device
from cloze.service.tasks import embed

_TORCH_VARIANTS: Mapping[str, Mapping[str, bool]] = {
    "padded": {},
    "nested": {"nested": True},
    "compiled": {"compiled": True},
}
"""Options of `TorchEncoder`, in ascending order of the time to start; the last takes a minute."""

_SLOW_PART_S = 60.0
"""Remaining time that a slow part needs: torch's compiler, or the start and load of a server."""

_MIN_READY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What to measure on a device.

    Attributes:
        device: on a CPU, the fp32 graph runs in batches of one length.
        sizes: of `cloze.bench.sizes.SIZES`.
        lengths: of all sequences of a batch, in tokens.
        frontends: front end processes, one server each; 0 is a single process.
        sequences: of the mix of lengths, and texts for the servers.
        texts_per_request: of the servers' full load.
        seconds: of a measurement; the load of a server takes ten times as long.
        minutes: no further part begins after this time; no slow part begins in the last minute.
    """

    device: Device
    sizes: tuple[str, ...] = ("bert-base", "bert-large", "distilbert")
    lengths: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    batch_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    frontends: tuple[int, ...] = (0, 1, 2, 4, 8, 12)
    sequences: int = 1024
    texts_per_request: int = 32
    seconds: float = 0.4
    minutes: float = 8.0


@dataclass(slots=True)
class DeviceFigures:
    """What was measured, what was left out and why, and what failed."""

    cells: list[Cell] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    starts: list[ServerStart] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def gpu_name(device: Device) -> str:
    """Return the name of the GPU, or an empty string without one."""
    cuda = device is Device.CUDA and torch.cuda.is_available()
    return torch.cuda.get_device_name() if cuda else ""


def measure_device(
    plan: DevicePlan,
    folder: Path,
    report: Report,
    save: Callable[[DeviceFigures], None] = lambda _: None,
) -> DeviceFigures:
    """Measure all engines, then servers on the first engine, then torch.

    A part that fails is reported, and the other parts run.

    Args:
        folder: empty; receives checkpoints and bundles with random weights, some GB.
        save: receives all figures after each part, so that a later failure does not lose them.

    Raises:
        BenchError: torch sees no GPU.
    """
    if plan.device is Device.CUDA and not torch.cuda.is_available():
        raise BenchError("CUDA was asked for, but torch sees no GPU")
    run = _DeviceRun(plan, folder, report, save)
    for name in plan.sizes:
        run.part(f"{name}, written and compared with torch", partial(run.open, name))
    for name, size in run.sizes.items():
        run.part(f"{name}, one length per batch", partial(run.grid, name, size))
        run.part(f"{name}, the batches that torch runs", size.measure_compared)
    for size in list(run.sizes.values())[:1]:
        run.part("servers", partial(run.servers, size.bundle))
    for variant in _TORCH_VARIANTS:
        for name, size in run.sizes.items():
            title = f"{name} torch {variant}"
            run.part(title, partial(run.measure_torch, title, size, variant))
    return run.figures


@dataclass(frozen=True, slots=True)
class _ServerLoad:
    """Texts, how to send them, and how many of the servers receive them."""

    texts: list[str]
    plan: Plan
    max_servers: int | None = None


class _DeviceRun:
    """The parts of a run, and the figures measured so far."""

    def __init__(
        self,
        plan: DevicePlan,
        folder: Path,
        report: Report,
        save: Callable[[DeviceFigures], None],
    ) -> None:
        self._plan, self._folder, self._report, self._save = plan, folder, report, save
        self._deadline = time.monotonic() + 60 * plan.minutes
        self.figures = DeviceFigures()
        self.sizes: dict[str, SizeBenchmark] = {}
        peak = peak_flops(plan.device)
        self._options = SizeOptions(plan.device, plan.sequences, plan.seconds, peak)
        self._note(f"peak: {peak / 1e12:.3g} TFLOP/s, torch's product of two large matrices")

    def part(self, name: str, work: Callable[[], None]) -> None:
        """Run one part, unless the time is over."""
        if not self._has_time(name):
            return
        began = time.monotonic()
        try:
            work()
            self._report(f"{name}: {time.monotonic() - began:.0f} s")
        # Errors of a runtime, of torch or of a driver have no common type. The figures of the
        # earlier parts stay valid.
        except Exception as error:
            self._note(f"{name}: failed: {_summary(error)}")
            self.figures.failed.append(name)
        self._save(self.figures)

    def open(self, name: str) -> None:
        """Export an architecture and open its engine."""
        size = SizeBenchmark(name, self._folder, self._options, self._record)
        self.sizes[name] = size
        if size.cost is not None:
            fitted = f"{size.batch_tokens} tokens per batch were fitted"
            self._note(f"{name}: of a batch, {size.cost}; {fitted}")

    def grid(self, name: str, size: SizeBenchmark) -> None:
        """Measure every length in every batch size."""
        for length in self._plan.lengths:
            for tokens in self._plan.batch_tokens:
                fits = length <= min(tokens, size.longest)
                if fits and self._has_time(f"{name}, {length} tokens in {tokens}"):
                    size.measure_one_length(length, tokens)

    def measure_torch(self, title: str, size: SizeBenchmark, variant: str) -> None:
        """Measure one variant of torch.

        A variant that this version of torch does not support is left out, and is no failure.
        """
        if variant == "compiled" and not self._has_time(title, _SLOW_PART_S):
            return
        try:
            difference = size.measure_torch(variant, _TORCH_VARIANTS[variant])
        except BenchError:
            raise
        except Exception as error:
            self._note(f"{title}: left out: {_summary(error)}")
        else:
            self._note(f"{title}: embeddings differ from the engine's by {difference:.1e}")

    def servers(self, bundle: Bundle) -> None:
        """Measure the engine alone, and servers with each number of front ends."""
        plan, store = self._plan, bundle.path.parents[1]
        name = bundle.manifest.name
        model = MeasuredModel(name, store, embed.TASK, device=plan.device)
        servers = [cloze_server(name, model, number) for number in plan.frontends]
        for load in self._server_loads(bundle):
            engine = partial(EngineAlone, model, load.texts)
            self._measure({f"{name} engine": engine}, [], load)
            for server in servers[: load.max_servers]:
                title = f"{server.name}, {load.plan.closed(max(load.plan.clients)).name}"
                if self._has_time(title, _SLOW_PART_S):
                    self._measure({}, [server], load)

    def _server_loads(self, bundle: Bundle) -> list[_ServerLoad]:
        """Return full requests of SQuAD's lengths, and single short texts of one client.

        The single texts show the latency without load.
        """
        plan, words = self._plan, words_of(bundle)
        rng = np.random.default_rng(2)
        lengths = squad_lengths(plan.sequences, bundle.manifest.limits.max_tokens).tolist()
        # [CLS] and [SEP] are two of the tokens.
        long = [" ".join(rng.choice(words, max(1, length - 2)).tolist()) for length in lengths]
        short = make_texts(words, plan.sequences).texts
        each, clients = plan.texts_per_request, 2 * max(2, *plan.frontends)
        single = Plan((1,), (), (), bulk=False, seconds=10 * plan.seconds, turns=1, label="short")
        full = dataclasses.replace(
            single, clients=(clients,), texts_per_request=each, label=f"{SQUAD} x {each}"
        )
        return [_ServerLoad(long, full), _ServerLoad(short, single, max_servers=2)]

    def _measure(
        self,
        engines: dict[str, Callable[[], EngineAlone]],
        servers: list[MeasuredServer],
        load: _ServerLoad,
    ) -> None:
        left_s = max(_MIN_READY_TIMEOUT_S, self._deadline - time.monotonic())
        servers = [
            dataclasses.replace(server, ready_timeout_s=min(server.ready_timeout_s, left_s))
            for server in servers
        ]
        measured = measure(engines, servers, load.texts, load.plan, self._report)
        self.figures.turns += measured.turns
        self.figures.starts += measured.starts
        self.figures.notes += measured.left_out

    def _record(self, cell: Cell) -> None:
        self.figures.cells.append(cell)
        self._report(
            f"{cell.subject}, {cell.lengths} tokens, {cell.batch_tokens} per batch: "
            f"{cell.tokens_per_s:,.0f} tokens/s, {cell.sequences_per_s:,.0f} sequences/s, "
            f"{cell.of_peak:.0%} of the peak"
        )

    def _note(self, line: str) -> None:
        self.figures.notes.append(line)
        self._report(line)

    def _has_time(self, name: str, needed_s: float = 0.0) -> bool:
        """Return whether a part has enough time; note the part if not."""
        if time.monotonic() + needed_s < self._deadline:
            return True
        self._note(f"{name}: left out, for want of time in {self._plan.minutes:g} minutes")
        return False


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)[:300]}"
