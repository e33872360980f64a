"""Measures one architecture on one device: its engine alone, and torch on the same batches."""

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cloze.bench.errors import BenchError
from cloze.bench.result import Cell
from cloze.bench.sizes import flops, random_bundle, squad_lengths
from cloze.bench.subjects import batches_for, cut_batches, rounds_per_s, run_all
from cloze.bench.torch_encoder import TorchEncoder
from cloze.model_store.batch import Encoding
from cloze.model_store.heads import HeadRequest
from cloze.model_store.heads.embedding import HEAD
from cloze.service.batching.cost import BatchCostModel, measure_cost
from cloze.service.core import Device
from cloze.service.engine.onnx_engine import OnnxEngine
from cloze.service.settings import CPU_BATCH_TOKENS, Settings

SQUAD = "SQuAD"
"""The name of a mix of lengths, used in place of a length."""

_TYPICAL_LENGTH = 128

_MIN_TIMED_S = 0.05
"""Shortest duration of the batches that are timed together.

The start of the threads takes a negligible share of this time.
"""

_MAX_TIMED_REPEATS = 500
_ALIKE_BATCHES = 8

_LARGEST_ERROR = 0.02
"""Of our embeddings against torch's, both in fp16: ``|ours - torch's| / |torch's|``."""


class SizeBenchmark:
    """An engine with random weights, exported, compared with torch, and opened as any engine is.

    Args:
        folder: receives the checkpoint and the bundle.
        sequences: number of sequences with SQuAD's lengths.
        seconds: duration of a measurement.
        record: receives the figures.

    Attributes:
        longest: tokens of the longest sequence.
        cost: the cost model that a server fits at start-up; None without variable-length batches.
        batch_tokens: largest number of tokens per batch, as in a server.

    Raises:
        ExportError: the graph does not agree with torch.
        StartupError: the device is missing.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        device: Device,
        record: Callable[[Cell], None],
        *,
        sequences: int,
        seconds: float,
    ) -> None:
        self._name, self._device, self._record, self._seconds = name, device, record, seconds
        self.bundle, self._checkpoint = random_bundle(name, folder, cuda=device is Device.CUDA)
        self._config = self._checkpoint.model.config
        self._engine = OnnxEngine(self.bundle, device, "auto")
        settings = Settings()
        self._workers = settings.worker_count(device)
        self.longest = self.bundle.manifest.limits.max_tokens
        self._squad = self._encodings(squad_lengths(sequences, self.longest))
        self.cost: BatchCostModel | None = None
        self.batch_tokens = CPU_BATCH_TOKENS
        if self._engine.supports_varlen:
            self.cost = measure_cost(self._engine, [HEAD], self.longest)
            self.batch_tokens = self.cost.batch_tokens(settings.batch_latency_ms / 1000)
        self._typical = min(_TYPICAL_LENGTH, self.longest)

    def measure_one_length(self, length: int, tokens: int) -> None:
        """Measure batches of about `tokens` tokens, all sequences of `length` tokens."""
        batch = self._encodings(np.full(tokens // length, length))
        rounds = self._rounds_per_s([batch])
        self._add(f"{self._name} engine", str(length), tokens, batch, rounds)

    def measure_compared(self) -> None:
        """Measure the batches that torch runs as well.

        The sequences with SQuAD's lengths run twice: without padding, and padded to the longest
        sequence of each batch.
        """
        engine, budget = f"{self._name} engine", self.batch_tokens
        batches = batches_for(self._engine, self._squad, budget)
        padded = [
            self._encodings(np.full(len(batch), max(map(len, batch))))
            for batch in cut_batches(self._squad, budget)
        ]
        for subject, run in ((engine, batches), (f"{engine}, padded", padded)):
            self._add(subject, SQUAD, budget, self._squad, self._rounds_per_s(run))
        self.measure_one_length(self._typical, budget)

    def measure_torch(self, subject: str, *, compiled: bool) -> float:
        """Measure torch on the same batches with the same weights.

        Returns:
            The difference between the embeddings of torch and of the engine on two batches:
            ``|ours - torch's| / |torch's|``.

        Raises:
            BenchError: the difference is too large, so one of the two is wrong.
            Exception: torch cannot compile here.
        """
        peer = TorchEncoder(self._checkpoint.model, _torch_device(self._device), compiled=compiled)
        largest, budget = 0.0, self.batch_tokens
        alike = self._encodings(np.full(budget // self._typical, self._typical))
        squad = cut_batches(self._squad, budget)
        for lengths, batches in ((SQUAD, squad), (str(self._typical), [alike] * _ALIKE_BATCHES)):
            prepared = [peer.prepare([sequence.input_ids for sequence in b]) for b in batches]
            largest = max(largest, self._difference(peer.run(prepared)[0], batches[0]))
            if not largest < _LARGEST_ERROR:
                raise BenchError(
                    f"{subject} and the engine differ by {largest:.1e}, "
                    f"more than {_LARGEST_ERROR}: one of them is wrong"
                )
            rounds = rounds_per_s(partial(peer.run, prepared), 2 * self._seconds)
            self._add(subject, lengths, budget, [each for b in batches for each in b], rounds)
        return largest

    def _difference(self, theirs: NDArray[np.float32], batch: list[Encoding]) -> float:
        if self._engine.supports_varlen:
            outputs = self._engine.run(batch)
        else:
            outputs = [self._engine.run([encoding])[0] for encoding in batch]
        ours = np.array([output[HEAD.name].array for output in outputs])
        return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))

    def _encodings(self, lengths: NDArray[np.int64]) -> list[Encoding]:
        """Return sequences of random tokens, one per length."""
        rng, requests = np.random.default_rng(1), {HEAD.name: HeadRequest()}
        return [
            Encoding(
                rng.integers(5, self._config.vocab_size, length, dtype=np.int32),
                np.zeros(length, np.int32),
                requests,
            )
            for length in lengths.tolist()
        ]

    def _rounds_per_s(self, batches: list[list[Encoding]]) -> float:
        """Return how often the engine runs all batches per second."""
        run_all(self._engine, batches, self._workers)  # warm-up
        began = time.perf_counter()
        run_all(self._engine, batches, self._workers)
        took_s = max(1e-6, time.perf_counter() - began)
        repeats = max(1, min(_MAX_TIMED_REPEATS, round(_MIN_TIMED_S / took_s)))
        if len(batches) == 1:
            # Every worker gets the batch: workers take turns on a GPU, and share a CPU.
            repeats = max(repeats, self._workers)
        run = partial(run_all, self._engine, batches * repeats, self._workers)
        return repeats * rounds_per_s(run, self._seconds)

    def _add(
        self,
        subject: str,
        lengths: str,
        batch_tokens: int,
        sequences: Sequence[Encoding],
        rounds: float,
    ) -> None:
        """Record that the sequences, without padding, run `rounds` times per second."""
        sizes = [len(encoding) for encoding in sequences]
        cell = Cell(
            subject,
            lengths,
            batch_tokens,
            tokens_per_s=rounds * sum(sizes),
            sequences_per_s=rounds * len(sizes),
            of_peak=rounds * flops(self._config, sizes) / peak_flops(self._device),
            engine=f"{self._name} engine",
        )
        self._record(cell)


def _torch_device(device: Device) -> torch.device:
    return torch.device("cuda" if device is Device.CUDA else "cpu")


@cache
def peak_flops(device: Device) -> float:
    """Return the operations per second of torch's product of two large random matrices.

    The matrices are fp16 on a GPU and fp32 on a CPU.
    """
    cuda = device is Device.CUDA
    rows, products = (8192, 20) if cuda else (2048, 2)
    dtype, on = torch.float16 if cuda else torch.float32, _torch_device(device)
    a, b = (torch.randn(rows, rows, device=on, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        for _ in range(products):
            torch.mm(a, b)
        if cuda:
            torch.cuda.synchronize()

    multiply()
    return rounds_per_s(multiply, 1.0) * products * 2 * rows**3
