"""One architecture on one device: its engine alone, and torch on the same batches."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.errors import BenchError
from bench.peers.torch_encoder import TorchEncoder
from bench.result import COMPARED, ONE_LENGTH, Cell
from bench.sizes import SIZES, flops, random_bundle, squad_lengths
from bench.throughput import batches_for, cut, rounds_per_s, run_all
from model_store.batch import Encoding
from model_store.heads.embedding import HEAD, EmbeddingRequest
from service.batching.cost import BatchCostModel, measure_cost
from service.core import Device
from service.engine import OnnxEngine
from service.settings import CPU_BATCH_TOKENS, Settings

SQUAD = "SQuAD"
"""Stands for a mix of lengths where else a length does."""

TYPICAL_LENGTH = 128

_LEAST_ROUND_S = 0.05
"""Of batches that are timed together: what it takes to start threads then no longer shows."""

_LARGEST_ERROR = 0.02
"""Between embeddings of ours and torch's, both in fp16: ``|ours - torch's| / |torch's|``."""


class OneSize:
    """An engine of random weights, written, compared with torch and opened as any is.

    Args:
        name: of `SIZES`.
        device: where.
        folder: gets its checkpoint and a store with its bundle.
        sequences: of SQuAD's lengths.
        seconds: of each measurement.
        peak: operations a second.
        keep: takes what is found.

    Raises:
        ExportError: the graph does not agree with torch.
        StartupError: the device did not come up.
    """

    def __init__(
        self,
        name: str,
        device: Device,
        folder: Path,
        *,
        sequences: int,
        seconds: float,
        peak: float,
        keep: Callable[[Cell], None],
    ) -> None:
        self._name, self._device, self._seconds, self._peak, self._keep = (
            name,
            device,
            seconds,
            peak,
            keep,
        )
        self.bundle, self._checkpoint = random_bundle(name, folder, cuda=device is Device.CUDA)
        self._engine = OnnxEngine(self.bundle, device, "auto")
        settings = Settings()
        self._workers = settings.worker_count(self._engine.device)
        self.longest = self.bundle.manifest.limits.max_tokens
        self._mixed = self._queries(squad_lengths(sequences, self.longest))
        self.cost: BatchCostModel | None = None
        """As a server fits it at its start, where the engine mixes lengths."""
        self.batch_tokens = CPU_BATCH_TOKENS
        if self._engine.supports_varlen:
            self.cost = measure_cost(self._engine, [HEAD], self.longest)
            self.batch_tokens = self.cost.batch_tokens(settings.batch_latency_ms / 1000)

    def one_length(self, length: int, tokens: int) -> None:
        """Batches of so many tokens, all sequences of one length."""
        batch = self._queries(np.full(tokens // length, length))
        self._time(f"{self._name} engine", ONE_LENGTH, str(length), tokens, [batch])

    def other_batches(self) -> None:
        """Those that torch runs as well, and SQuAD's lengths padded to the longest of each batch."""
        batches = cut(self._mixed, self.batch_tokens)
        padded = [self._queries(np.full(len(batch), max(map(len, batch)))) for batch in batches]
        taken = batches_for(self._engine, self._mixed, self.batch_tokens)
        self._time(f"{self._name} engine", COMPARED, SQUAD, self.batch_tokens, taken)
        self._time(
            f"{self._name} engine, padded",
            COMPARED,
            SQUAD,
            self.batch_tokens,
            padded,
            real=self._mixed,
        )
        length, batches = self._alike()
        self._time(f"{self._name} engine", COMPARED, str(length), self.batch_tokens, batches)

    def beside_torch(self, way: str, options: Mapping[str, bool]) -> float:
        """The same batches and weights in torch.

        Args:
            way: its name.
            options: of `TorchEncoder`.

        Returns:
            How far its embeddings are from the engine's: ``|ours - torch's| / |torch's|``, of two batches.

        Raises:
            BenchError: they are too far: one of both is wrong.
            Exception: whatever this version of torch cannot do.
        """
        name, worst = f"{self._name} torch {way}", 0.0
        on = torch_device(self._device)
        torch.compiler.reset()  # else it gives up compiling after some sizes, and says nothing
        peer = TorchEncoder(self._checkpoint.model, on, **options)
        length, alike = self._alike()
        for lengths, batches in (
            (SQUAD, cut(self._mixed, self.batch_tokens)),
            (str(length), alike),
        ):
            prepared = [peer.prepare([query.input_ids for query in batch]) for batch in batches]
            worst = max(worst, self._difference(peer.run(prepared)[0], batches[0]))
            if not worst < _LARGEST_ERROR:
                raise BenchError(
                    f"{name} and the engine differ by {worst:.1e}, more than {_LARGEST_ERROR}: one of them is wrong"
                )
            rounds = rounds_per_s(partial(peer.run, prepared), 2 * self._seconds)
            self._note(
                name,
                COMPARED,
                lengths,
                self.batch_tokens,
                [query for batch in batches for query in batch],
                rounds,
            )
        return worst

    def _difference(self, theirs: NDArray[np.float32], batch: list[Encoding]) -> float:
        mixed = self._engine.supports_varlen
        outputs = (
            self._engine.run(batch) if mixed else [self._engine.run([query])[0] for query in batch]
        )
        ours = np.array([output[HEAD.name].embedding for output in outputs])
        return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))

    def _alike(self) -> tuple[int, list[list[Encoding]]]:
        length = min(TYPICAL_LENGTH, self.longest)
        return length, [self._queries(np.full(self.batch_tokens // length, length))] * 8

    def _queries(self, lengths: NDArray[np.int64]) -> list[Encoding]:
        rng = np.random.default_rng(1)
        vocabulary = SIZES[self._name].vocab_size
        asked = {HEAD.name: EmbeddingRequest()}
        return [
            Encoding(
                rng.integers(5, vocabulary, length, dtype=np.int32),
                np.zeros(length, np.int32),
                asked,
            )
            for length in lengths.tolist()
        ]

    def _time(
        self,
        subject: str,
        group: str,
        lengths: str,
        tokens: int,
        batches: list[list[Encoding]],
        *,
        real: Sequence[Encoding] | None = None,
    ) -> None:
        """Time the batches, as often as it takes, and note what of them is ``real``; all, unless given."""
        times = []
        for _ in range(2):  # the first warms up
            began = time.perf_counter()
            run_all(self._engine, batches, self._workers)
            times.append(max(1e-6, time.perf_counter() - began))
        # One batch is given to every worker: they take turns on a GPU, and share a CPU.
        repeats = max(
            1, min(500, round(_LEAST_ROUND_S / times[1])), self._workers if len(batches) == 1 else 1
        )
        rounds = rounds_per_s(
            lambda: run_all(self._engine, batches * repeats, self._workers), self._seconds
        )
        queries = real if real is not None else [query for batch in batches for query in batch]
        self._note(subject, group, lengths, tokens, queries, rounds * repeats)

    def _note(
        self,
        subject: str,
        group: str,
        lengths: str,
        tokens: int,
        queries: Sequence[Encoding],
        rounds: float,
    ) -> None:
        sizes = [len(query) for query in queries]
        share = rounds * flops(SIZES[self._name], sizes) / self._peak
        self._keep(
            Cell(subject, group, lengths, tokens, rounds * sum(sizes), rounds * len(sizes), share)
        )


def torch_device(device: Device) -> torch.device:
    """Torch's name for it."""
    return torch.device("cuda" if device is Device.CUDA else "cpu")


def peak_flops(device: Device) -> float:
    """Operations a second of torch's product of two large matrices, random values: fp16 on a GPU, fp32 on a CPU."""
    cuda = device is Device.CUDA
    rows, products = (8192, 20) if cuda else (2048, 2)
    a, b = (
        torch.randn(
            rows, rows, device=torch_device(device), dtype=torch.float16 if cuda else torch.float32
        )
        for _ in range(2)
    )

    def play() -> None:
        for _ in range(products):
            torch.mm(a, b)
        if cuda:
            torch.cuda.synchronize()

    play()
    return rounds_per_s(play, 1.0) * products * 2 * rows**3
