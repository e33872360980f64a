"""All that a device gives, in one run of bounded time: engines of several sizes, servers on them, torch beside them."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.errors import BenchError
from bench.one_size import SQUAD, OneSize, peak_flops
from bench.result import Cell, Start, Turn
from bench.run import Plan, measure
from bench.sizes import squad_lengths
from bench.subjects import EngineAlone, Served, cloze
from bench.texts import make_texts, words_of
from model_store import Bundle
from service.core import Device, RequestedPrecision, first_line
from service.tasks import embed

Say = Callable[[str], None]

_TORCH: Mapping[str, Mapping[str, bool]] = {
    "padded": {},
    "nested": {"nested": True},
    "compiled": {"compiled": True},
}
"""In the order of what each costs to begin; the last takes a minute."""

_LEAST_LEFT_S = 60.0
"""Of the time, for parts of which one may take a minute: compiling, a server's start and load."""


@dataclass(frozen=True, slots=True)
class Programme:
    """What to measure.

    Attributes:
        device: where. On a CPU the fp32 graph runs, in batches of one length.
        sizes: of `bench.sizes.SIZES`.
        lengths: of all sequences of a batch, tokens.
        batch_tokens: of a batch.
        frontends: of servers, one each; 0 is a single process.
        sequences: of the mix of lengths, and texts for the servers.
        texts_per_request: of the servers' full load.
        seconds: of a measurement; a server's load takes ten times that.
        minutes: after which nothing further begins; a minute before, nothing that may take one.
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
class Found:
    """What was measured, what was not and why, and what failed."""

    cells: list[Cell] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def card(device: Device) -> str:
    """The GPU's name; empty on a CPU."""
    return torch.cuda.get_device_name() if device is Device.CUDA else ""


def run_programme(
    programme: Programme, folder: Path, say: Say, keep: Callable[[Found], None] = lambda _: None
) -> Found:
    """Run it: all engines, then servers on the first, then torch. A part that fails is told, and the others go on.

    Args:
        programme: what to measure.
        folder: empty; gets checkpoints and bundles of random weights, some GB.
        say: is told what was found, a line each.
        keep: is given what there is after each part, so that nothing is lost if a later one does not end.

    Raises:
        BenchError: torch sees no GPU.
    """
    if programme.device is Device.CUDA and not torch.cuda.is_available():
        raise BenchError("CUDA was asked for, but torch sees no GPU")
    run = _Run(programme, folder, say, keep)
    for name in programme.sizes:
        run.part(f"{name}, written and compared with torch", partial(run.open, name))
    for name, size in run.sizes.items():
        run.part(f"{name}, one length a batch", partial(run.grid, name, size))
        run.part(f"{name}, the batches that torch runs", size.other_batches)
    for size in list(run.sizes.values())[:1]:
        run.part("servers", partial(run.servers, size.bundle))
    for way in _TORCH:
        for name, size in run.sizes.items():
            run.part(
                f"{name} torch {way}", partial(run.beside_torch, f"{name} torch {way}", size, way)
            )
    return run.found


class _Run:
    """What is found part by part, until the time is over."""

    def __init__(
        self, programme: Programme, folder: Path, say: Say, keep: Callable[[Found], None]
    ) -> None:
        self._programme, self._folder, self._say, self._keep = programme, folder, say, keep
        self._deadline = time.monotonic() + 60 * programme.minutes
        self.found = Found()
        self.sizes: dict[str, OneSize] = {}
        self._peak = peak_flops(programme.device)
        self._note(f"peak: {self._peak / 1e12:.3g} TFLOP/s, torch's product of two large matrices")

    def part(self, name: str, work: Callable[[], None]) -> None:
        """Do it, unless the time is over."""
        if not self._left(name):
            return
        began = time.monotonic()
        try:
            work()
            self._say(f"{name}: {time.monotonic() - began:.0f} s")
        except (
            Exception
        ) as error:  # of a runtime, of torch, of a driver: what was found before is worth keeping
            self._note(f"{name}: failed: {type(error).__name__}: {first_line(error)[:300]}")
            self.found.failed.append(name)
        self._keep(self.found)

    def open(self, name: str) -> None:
        """Write and open an engine."""
        plan = self._programme
        size = OneSize(
            name,
            plan.device,
            self._folder,
            sequences=plan.sequences,
            seconds=plan.seconds,
            peak=self._peak,
            keep=self._take,
        )
        self.sizes[name] = size
        if size.cost is not None:
            self._note(
                f"{name}: of a batch, {size.cost}; {size.batch_tokens} tokens a batch were fitted"
            )

    def grid(self, name: str, size: OneSize) -> None:
        """Every length and size of batch."""
        for length in self._programme.lengths:
            for tokens in self._programme.batch_tokens:
                if length <= min(tokens, size.longest) and self._left(
                    f"{name}, {length} tokens in {tokens}"
                ):
                    size.one_length(length, tokens)

    def beside_torch(self, name: str, size: OneSize, way: str) -> None:
        """One of torch's ways; that this version of it has not, is no failure."""
        if way == "compiled" and not self._left(name, _LEAST_LEFT_S):
            return
        try:
            self._note(
                f"{name}: embeddings differ from the engine's by {size.beside_torch(way, _TORCH[way]):.1e}"
            )
        except BenchError:
            raise
        except Exception as error:
            self._note(f"{name}: left out: {type(error).__name__}: {first_line(error)[:300]}")

    def servers(self, bundle: Bundle) -> None:
        """Full requests of SQuAD's lengths on so many front ends; then single short texts, one client, to see the latency."""
        plan, name, words = self._programme, bundle.manifest.name, words_of(bundle)
        rng = np.random.default_rng(2)
        lengths = squad_lengths(plan.sequences, bundle.manifest.limits.max_tokens)
        long = [
            " ".join(rng.choice(words, max(1, length - 2)).tolist()) for length in lengths.tolist()
        ]
        short = make_texts(words, plan.sequences).texts
        store = bundle.path.parents[1]
        auto: RequestedPrecision = "auto"
        servers = [
            cloze(
                f"{name}{_frontends(number)} server",
                name,
                store,
                "/embed",
                auto,
                plan.device,
                number,
            )
            for number in plan.frontends
        ]
        each, clients = plan.texts_per_request, 2 * max(2, *plan.frontends)
        full = Plan(
            (clients,),
            (),
            texts_per_request=each,
            bulk=False,
            seconds=10 * plan.seconds,
            turns=1,
            label=f"{SQUAD} x {each}",
        )
        low = Plan((1,), (), bulk=False, seconds=10 * plan.seconds, turns=1, label="short")
        for texts, load, subjects in ((long, full, servers), (short, low, servers[:2])):
            engine = partial(
                EngineAlone, name, store, embed.TASK, texts, precision=auto, device=plan.device
            )
            self._measure({f"{name} engine": engine}, [], texts, load)
            for server in subjects:
                if self._left(f"{server.name}, {load.closed(max(load.clients))}", _LEAST_LEFT_S):
                    self._measure({}, [server], texts, load)

    def _measure(
        self,
        engines: dict[str, Callable[[], EngineAlone]],
        servers: list[Served],
        texts: list[str],
        load: Plan,
    ) -> None:
        left = max(10.0, self._deadline - time.monotonic())
        servers = [
            dataclasses.replace(server, ready_timeout_s=min(server.ready_timeout_s, left))
            for server in servers
        ]
        turns, starts = measure(
            engines,
            servers,
            texts,
            load,
            lambda line: (self._note if "left out" in line else self._say)(line),
        )
        self.found.turns += turns
        self.found.starts += starts

    def _take(self, cell: Cell) -> None:
        self.found.cells.append(cell)
        self._say(
            f"{cell.subject}, {cell.lengths} tokens, {cell.batch_tokens} a batch: {cell.tokens_per_s:,.0f} tokens/s, "
            f"{cell.sequences_per_s:,.0f} sequences/s, {cell.of_peak:.0%} of the peak"
        )

    def _note(self, line: str) -> None:
        self.found.notes.append(line)
        self._say(line)

    def _left(self, name: str, needed_s: float = 0.0) -> bool:
        """Whether there is time for it; tells if not."""
        if time.monotonic() + needed_s < self._deadline:
            return True
        self._note(f"{name}: left out, for want of time in {self._programme.minutes:g} minutes")
        return False


def _frontends(number: int) -> str:
    return f" {number} front end{'s' * (number > 1)}" if number else ""
