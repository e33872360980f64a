"""All that a device gives, in one run of bounded time: engines of several sizes, torch beside them, servers on top of them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from bench.errors import BenchError
from bench.peers.torch_encoder import TorchEncoder
from bench.result import Cell, Start, Turn
from bench.run import Plan, measure
from bench.sizes import SIZES, flops, random_bundle, squad_lengths
from bench.subjects import EngineAlone, cloze
from bench.texts import make_texts, words_of
from bench.throughput import batches_for, cut, rounds_per_s, run_all
from model_store import Bundle, Task
from service.core import AskedPrecision, Device, Query
from service.cost import measure_cost
from service.engine import OnnxEngine
from service.settings import CPU_BATCH_TOKENS, Settings

T = TypeVar("T")
Say = Callable[[str], None]

SQUAD = "SQuAD"
"""Stands for a mix of lengths where else a length does."""

_LEAST_ROUND_S = 0.05
"""Of batches that are timed together: what it takes to start threads then no longer shows."""

_TYPICAL_LENGTH = 128

_CLIENTS = 16
"""Of the servers' full load: two requests for each of eight front ends."""

_LARGEST_ERROR = 0.02
"""Between embeddings of ours and torch's, both in fp16: ``|ours - torch's| / |torch's|``."""

_TORCH: Mapping[str, Mapping[str, bool]] = {"padded": {}, "nested": {"nested": True}, "compiled": {"compiled": True}}
"""In the order of what each costs to begin."""


@dataclass(frozen=True, slots=True)
class Programme:
    """What to measure.

    Attributes:
        device: where. On a CPU the fp32 graph runs, in batches of one length.
        sizes: of `SIZES`.
        lengths: of all sequences of a batch, tokens.
        batch_tokens: of a batch.
        frontends: of servers, one each; 0 is a single process.
        sequences: of the mix of lengths, and texts for the servers.
        texts_per_request: of the servers' full load.
        seconds: of a cell; a server's load takes ten times that.
        minutes: after which no further part begins.
    """

    device: Device
    sizes: tuple[str, ...] = ("bert-base", "bert-large", "distilbert")
    lengths: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    batch_tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    frontends: tuple[int, ...] = (0, 1, 2, 4, 8, 12)
    sequences: int = 1024
    texts_per_request: int = 32
    seconds: float = 0.4
    minutes: float = 9.0


@dataclass(slots=True)
class Found:
    """What was measured, and what was not and why."""

    cells: list[Cell] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def card(device: Device) -> str:
    """The GPU's name; empty on a CPU."""
    return torch.cuda.get_device_name() if device is Device.CUDA else ""


def run_programme(programme: Programme, folder: Path, say: Say) -> Found:
    """Run it, the first size whole, then the servers on it, then the other sizes.

    Args:
        programme: what to measure.
        folder: empty; gets bundles of random weights.
        say: is told what was found, a line each.

    Raises:
        ExportError: a graph does not agree with torch.
        BenchError: the engine does not, or torch sees no GPU.
        StartupError: the device did not come up.
    """
    if programme.device is Device.CUDA and not torch.cuda.is_available():
        raise BenchError("CUDA was asked for, but torch sees no GPU")
    found = Found()
    parts = _Parts(programme.minutes, found, say)
    peak = _peak(programme.device)
    parts.note(f"peak: {peak / 1e12:.3g} TFLOP/s, torch's product of two large matrices in {_type_of(programme.device)}")
    for name in programme.sizes:
        size = parts.run(f"{name}, written and compared with torch", partial(_Size, name, programme, folder, peak, parts))
        if size is None:
            continue
        parts.run(f"{name}, batches of one length", size.one_length)
        parts.run(f"{name}, the batches that torch runs", size.other_batches)
        if name == programme.sizes[0]:
            parts.run("servers", partial(_servers, programme, size.bundle, parts))
        for way, options in _TORCH.items():
            parts.run(f"{name}, torch {way}", partial(size.torch, way, options))
    return found


class _Parts:
    """What is found part by part, until the time is over."""

    def __init__(self, minutes: float, found: Found, say: Say) -> None:
        self._minutes, self._deadline = minutes, time.monotonic() + 60 * minutes
        self.found, self.say = found, say

    def note(self, line: str) -> None:
        """Say it, and keep it."""
        self.found.notes.append(line)
        self.say(line)

    def run(self, name: str, part: Callable[[], T]) -> T | None:
        """What the part returns; None if it may no longer begin."""
        began = time.monotonic()
        if began > self._deadline:
            self.note(f"{name}: left out, the {self._minutes:g} minutes are over")
            return None
        done = part()
        self.say(f"{name}: {time.monotonic() - began:.0f} s")
        return done


def _type_of(device: Device) -> str:
    return "fp16" if device is Device.CUDA else "fp32"


def _torch_device(device: Device) -> torch.device:
    return torch.device("cuda" if device is Device.CUDA else "cpu")


def _peak(device: Device) -> float:
    """Floating-point operations a second of a large product, random values."""
    on, cuda = _torch_device(device), device is Device.CUDA
    rows = 8192 if cuda else 1024
    a, b = (torch.randn(rows, rows, device=on, dtype=torch.float16 if cuda else torch.float32) for _ in range(2))

    def products() -> None:
        for _ in range(20 if cuda else 2):
            torch.mm(a, b)
        if cuda:
            torch.cuda.synchronize()

    products()
    return rounds_per_s(products, 1.0 if cuda else 0.2) * (20 if cuda else 2) * 2 * rows**3


class _Size:
    """The engine of one architecture, and what runs on it."""

    def __init__(self, name: str, programme: Programme, folder: Path, peak: float, parts: _Parts) -> None:
        self._name, self._programme, self._peak, self._parts = name, programme, peak, parts
        self.bundle, self._checkpoint = random_bundle(name, folder, cuda=programme.device is Device.CUDA)
        self._engine = OnnxEngine(self.bundle, programme.device, AskedPrecision.AUTO)
        settings = Settings()
        self._workers = settings.worker_count(self._engine.device)
        self._longest = self.bundle.manifest.limits.max_tokens
        self._mixed = self._queries(squad_lengths(programme.sequences, self._longest))
        self._budget = CPU_BATCH_TOKENS
        if self._engine.mixes_lengths:  # as a server does at its start
            cost = measure_cost(self._engine, self._longest, embed=True)
            self._budget = cost.batch_tokens(settings.batch_latency_ms / 1000)
            parts.note(
                f"{name}: a batch takes {cost.fixed * 1e3:.2f} ms and {cost.per_token * 1e9:.0f} ns a token, "
                f"{cost.per_square * 1e9:.2f} ns more a token and token of its length; {self._budget} tokens a batch were fitted"
            )

    def one_length(self) -> None:
        """Tokens a second, and the share of the peak, for each length and size of batch."""
        for length in (length for length in self._programme.lengths if length <= self._longest):
            for tokens in (tokens for tokens in self._programme.batch_tokens if tokens >= length):
                batch = self._queries(np.full(tokens // length, length))
                self._cell(f"{self._name} engine", str(length), tokens, [batch])

    def other_batches(self) -> None:
        """What torch runs as well, and SQuAD's lengths padded to the longest of each batch."""
        batches = cut(self._mixed, self._budget)
        padded = [self._queries(np.full(len(batch), max(map(len, batch)))) for batch in batches]
        self._cell(f"{self._name} engine", SQUAD, self._budget, batches_for(self._engine, self._mixed, self._budget))
        self._cell(f"{self._name} engine, padded", SQUAD, self._budget, padded, real=self._mixed)
        length, batches = self._alike()
        self._cell(f"{self._name} engine", str(length), self._budget, batches)

    def _alike(self) -> tuple[int, list[list[Query]]]:
        length = min(_TYPICAL_LENGTH, self._longest)
        return length, [self._queries(np.full(self._budget // length, length))] * 8

    def torch(self, way: str, options: Mapping[str, bool]) -> None:
        """The peer on batches of SQuAD's lengths and of one length. What does not run there is told."""
        name = f"{self._name} torch {way}"
        try:
            peer = TorchEncoder(self._checkpoint.model, _torch_device(self._programme.device), **options)
            length, alike = self._alike()
            for lengths, batches in ((SQUAD, cut(self._mixed, self._budget)), (str(length), alike)):
                prepared = [peer.prepare([query.input_ids for query in batch]) for batch in batches]
                theirs = peer.run(prepared)[0]
                self._compare(theirs, batches[0], name)
                rounds = rounds_per_s(partial(peer.run, prepared), 2 * self._programme.seconds)
                self._note_cell(name, lengths, self._budget, [query for batch in batches for query in batch], rounds)
        except BenchError:
            raise
        except Exception as error:  # whatever this version of torch cannot do
            self._parts.note(f"{name}: left out: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")

    def _compare(self, theirs: NDArray[np.float32], batch: list[Query], name: str) -> None:
        outputs = [self._engine.run([query])[0] for query in batch] if not self._engine.mixes_lengths else self._engine.run(batch)
        ours = np.array([output.embedding for output in outputs])
        error = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
        self._parts.say(f"{name}: embeddings differ from the engine's by {error:.1e}")
        if not error < _LARGEST_ERROR:
            raise BenchError(f"{name} and the engine differ by {error:.1e}, more than {_LARGEST_ERROR}: one of them is wrong")

    def _queries(self, lengths: NDArray[np.int64]) -> list[Query]:
        rng = np.random.default_rng(1)
        vocabulary = SIZES[self._name].vocab_size
        return [
            Query(rng.integers(5, vocabulary, length, dtype=np.int32), np.zeros(length, np.int32), embed=True)
            for length in lengths.tolist()
        ]

    def _cell(
        self, subject: str, lengths: str, tokens: int, batches: list[list[Query]], *, real: Sequence[Query] | None = None
    ) -> None:
        """Time the batches, as often as it takes, and note what of them is ``real``; all, unless given."""
        began = time.perf_counter()
        run_all(self._engine, batches, self._workers)
        began, first = time.perf_counter(), began
        run_all(self._engine, batches, self._workers)
        once = max(1e-6, min(time.perf_counter() - began, began - first))
        repeats = max(1, min(500, round(_LEAST_ROUND_S / once)))
        # One batch is given to every worker: they take turns on a GPU, and share a CPU.
        repeats = max(repeats, self._workers if len(batches) == 1 else 1)
        rounds = rounds_per_s(lambda: run_all(self._engine, batches * repeats, self._workers), self._programme.seconds)
        queries = real if real is not None else [query for batch in batches for query in batch]
        self._note_cell(subject, lengths, tokens, queries, rounds * repeats)

    def _note_cell(self, subject: str, lengths: str, tokens: int, queries: Sequence[Query], rounds: float) -> None:
        sizes = [len(query) for query in queries]
        share = rounds * flops(SIZES[self._name], sizes) / self._peak
        cell = Cell(subject, lengths, tokens, rounds * sum(sizes), rounds * len(sizes), share)
        self._parts.found.cells.append(cell)
        self._parts.say(
            f"{subject}, {lengths} tokens, {tokens} a batch: {cell.tokens_per_s:,.0f} tokens/s, "
            f"{cell.sequences_per_s:,.0f} sequences/s, {cell.of_peak:.0%} of the peak"
        )


def _servers(programme: Programme, bundle: Bundle, parts: _Parts) -> None:
    """Full requests of SQuAD's lengths on so many front ends; then single short texts, one client, to see the latency."""
    name, store, words = bundle.manifest.name, bundle.path.parents[1], words_of(bundle)
    rng = np.random.default_rng(2)
    lengths = squad_lengths(programme.sequences, bundle.manifest.limits.max_tokens)
    long = [" ".join(rng.choice(words, max(1, length - 2)).tolist()) for length in lengths.tolist()]
    short = make_texts(words, programme.sequences).texts
    auto, device, seconds = AskedPrecision.AUTO, programme.device, 10 * programme.seconds

    def server(frontends: int) -> str:
        return f"{name}{f' {frontends} front ends' if frontends else ''} server"

    servers = [cloze(server(number), name, store, "/embed", auto, device, number) for number in programme.frontends]
    full = Plan(
        clients=(_CLIENTS,), shares=(), texts_per_request=programme.texts_per_request, bulk=False, seconds=seconds, turns=1
    )
    low = Plan(clients=(1,), shares=(), bulk=False, seconds=seconds, turns=1)
    for texts, plan, subjects in ((long, full, servers), (short, low, servers[:2])):
        engine = partial(EngineAlone, name, store, Task.EMBED, texts, precision=auto, device=device)
        turns, starts = measure({f"{name} engine": engine}, subjects, texts, plan, parts.say)
        parts.found.turns += turns
        parts.found.starts += starts
