"""Measures a device in one run of bounded time: engines of several sizes, servers, and torch.

On a CPU, a test runs the module. On a card, the module has never run.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from cloze.bench.errors import BenchError
from cloze.bench.machine import installed_versions
from cloze.bench.one_size import SQUAD, SizeBenchmark, peak_flops
from cloze.bench.processes import MeasuredServer
from cloze.bench.result import Cell, Result
from cloze.bench.run import Plan, measure
from cloze.bench.sizes import SIZES, squad_lengths
from cloze.bench.subjects import EngineAlone, MeasuredModel, cloze_server
from cloze.bench.texts import make_texts, words_of
from cloze.model_store import Bundle
from cloze.model_store.error_lines import first_line
from cloze.service.core import Device
from cloze.service.tasks import embed
from cloze.tables import report

_TEXTS_PER_REQUEST = 32
"""Of the servers' full load."""

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
        seconds: of a measurement; the load of a server takes ten times as long.
        minutes: no further part begins after this time; no slow part begins in the last minute.
    """

    device: Device
    sizes: tuple[str, ...]
    lengths: tuple[int, ...]
    batch_tokens: tuple[int, ...]
    frontends: tuple[int, ...]
    sequences: int
    seconds: float
    minutes: float


def measure_device(plan: DevicePlan, folder: Path) -> Iterator[Result]:
    """Measure all engines, then servers on the first engine, then torch.

    A part that fails is reported, and the other parts run.

    Args:
        folder: empty; receives checkpoints and bundles with random weights, some GB.

    Yields:
        The same result after each part, so that a later failure does not lose its figures.

    Raises:
        BenchError: torch sees no GPU, or there is no such size.
    """
    if unknown := [name for name in plan.sizes if name not in SIZES]:
        raise BenchError(f"--sizes: {unknown[0]!r} is none of {', '.join(SIZES)}")
    if plan.device is Device.CUDA and not torch.cuda.is_available():
        raise BenchError("CUDA was asked for, but torch sees no GPU")
    run = _DeviceRun(plan, folder)
    for name, optional, work in run.parts():
        run.try_part(name, work, optional=optional)
        yield run.result


Part = tuple[str, bool, Callable[[], None]]
"""The name of a part, whether the part may fail, and what it does."""


class _DeviceRun:
    """The parts of a run, and the figures measured so far."""

    def __init__(self, plan: DevicePlan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._deadline = time.monotonic() + 60 * plan.minutes
        self.result = Result(
            f"{', '.join(plan.sizes)}, embed",
            {"Cloze": installed_versions()},
            {"from": "random words", "lengths": "SQuAD 1.1's; short: those of search questions"},
        )
        self._sizes: dict[str, SizeBenchmark] = {}
        peak = peak_flops(plan.device) / 1e12
        self.result.note(f"peak: {peak:.3g} TFLOP/s, torch's product of two large matrices")

    def parts(self) -> Iterator[Part]:
        """Yield the parts; those of a size whose engine did not open are left out."""
        for name in self._plan.sizes:
            yield f"{name}, written and compared with torch", False, partial(self._open, name)
        for name, size in self._sizes.items():
            yield f"{name}, one length per batch", False, partial(self._grid, name, size)
            yield f"{name}, the batches that torch runs", False, size.measure_compared
        for size in list(self._sizes.values())[:1]:
            yield "servers", False, partial(self._servers, size.bundle)
        for compiled in (False, True):
            for name, size in self._sizes.items():
                title = f"{name} torch {'compiled' if compiled else 'padded'}"
                yield title, compiled, partial(self._torch, title, size, compiled=compiled)

    def try_part(self, name: str, work: Callable[[], None], *, optional: bool) -> None:
        """Run one part, unless the time is over.

        Not every machine has what an optional part needs, for example a compiler. But torch and the
        engine must agree in these parts, too.
        """
        if not self._has_time(name, _SLOW_PART_S if optional else 0.0):
            return
        began = time.monotonic()
        try:
            work()
            report(f"{name}: {time.monotonic() - began:.0f} s")
        # Errors of a runtime, of torch or of a driver have no common type. The figures of the
        # earlier parts stay valid.
        except Exception as error:
            self.result.note(f"{name}: failed: {type(error).__name__}: {first_line(error)[:300]}")
            if not optional or isinstance(error, BenchError):
                self.result.failed.append(name)

    def _open(self, name: str) -> None:
        """Export an architecture and open its engine."""
        plan = self._plan
        size = self._sizes[name] = SizeBenchmark(
            name,
            self._folder,
            plan.device,
            self._record,
            sequences=plan.sequences,
            seconds=plan.seconds,
        )
        if size.cost is not None:
            fitted = f"{size.batch_tokens} tokens per batch were fitted"
            self.result.note(f"{name}: of a batch, {size.cost}; {fitted}")

    def _grid(self, name: str, size: SizeBenchmark) -> None:
        """Measure every length in every batch size."""
        for length in self._plan.lengths:
            for tokens in self._plan.batch_tokens:
                fits = length <= min(tokens, size.longest)
                if fits and self._has_time(f"{name}, {length} tokens in {tokens}"):
                    size.measure_one_length(length, tokens)

    def _torch(self, title: str, size: SizeBenchmark, *, compiled: bool) -> None:
        difference = size.measure_torch(title, compiled=compiled)
        self.result.note(f"{title}: embeddings differ from the engine's by {difference:.1e}")

    def _servers(self, bundle: Bundle) -> None:
        """Measure the engine alone, and servers with each number of front ends.

        They get full requests of SQuAD's lengths. Two servers get single short texts of one client
        as well, which show the latency without load.
        """
        plan, words, name = self._plan, words_of(bundle), bundle.manifest.name
        rng = np.random.default_rng(2)
        lengths = squad_lengths(plan.sequences, bundle.manifest.limits.max_tokens).tolist()
        # [CLS] and [SEP] are two of the tokens.
        long = [" ".join(rng.choice(words, max(1, length - 2)).tolist()) for length in lengths]
        short = make_texts(words, plan.sequences).texts
        single = Plan((1,), (), (), bulk=False, seconds=10 * plan.seconds, turns=1, label="short")
        full = replace(
            single,
            clients=(2 * max(2, *plan.frontends),),
            texts_per_request=_TEXTS_PER_REQUEST,
            label=f"{SQUAD} x {_TEXTS_PER_REQUEST}",
        )
        model = MeasuredModel(name, bundle.path.parents[1], embed.TASK, device=plan.device)
        servers = [cloze_server(name, model, number) for number in plan.frontends]
        for texts, load, loaded in ((long, full, servers), (short, single, servers[:2])):
            engine = partial(EngineAlone, model, texts)
            measure({f"{name} engine": engine}, [], texts, load, self.result)
            for server in loaded:
                if self._has_time(f"{server.name}, {load.label}", _SLOW_PART_S):
                    measure({}, [self._in_time(server)], texts, load, self.result)

    def _in_time(self, server: MeasuredServer) -> MeasuredServer:
        """Return a server that must be ready before the time is over."""
        left_s = max(_MIN_READY_TIMEOUT_S, self._deadline - time.monotonic())
        return replace(server, ready_timeout_s=min(server.ready_timeout_s, left_s))

    def _record(self, cell: Cell) -> None:
        self.result.cells.append(cell)
        report(
            f"{cell.subject}, {cell.lengths} tokens, {cell.batch_tokens} per batch: "
            f"{cell.tokens_per_s:,.0f} tokens/s, {cell.sequences_per_s:,.0f} sequences/s, "
            f"{cell.of_peak:.0%} of the peak"
        )

    def _has_time(self, name: str, needed_s: float = 0.0) -> bool:
        """Return whether a part has enough time; note the part if not."""
        if time.monotonic() + needed_s < self._deadline:
            return True
        self.result.note(f"{name}: left out, for want of time in {self._plan.minutes:g} minutes")
        return False
