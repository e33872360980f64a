"""Compares a written graph with torch over a grid, and records golden outputs.

A graph that fails is not published.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from export.checkpoint import Checkpoint
from export.errors import ExportError
from export.evaluation.scorer import torch_outputs
from export.heads import EXPORT_HEADS
from export.models import Model
from export.session import Session, open_session
from model_store.batch import BatchCodec, Encoding
from model_store.heads import GraphSpec, Head
from model_store.layouts import Int32, Layout
from model_store.manifest import Graph, Parity, Precision
from model_store.parity import errors

GOLDEN_FILES = {
    Precision.FP32: "golden.json",
    Precision.INT8: "golden-int8.json",
    Precision.FP16: "golden-fp16.json",
}

TOLERANCES = {Precision.FP32: 1e-4, Precision.INT8: 0.25, Precision.FP16: 0.03}
"""fp32: several times the error of another order of summation in 24 layers. fp16: several times
the rounding error in 12 layers. int8: enough to see that a graph is not what it should be; the
gate decides whether the graph is good enough. No tighter comparison of int8 is possible, not even
with the same integers in torch: 1e-7 moves some value over the edge between two integers, and
after a few layers all values have moved (measured)."""

_BATCHES = (1, 2, 8)
_SHORT_LENGTHS = (3, 16, 128)  # tokens; 3 is one word with [CLS] and [SEP]
_GOLDEN_LENGTHS = (3, 16)

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Case:
    """One run: the graph's inputs, and torch's outputs for them."""

    feeds: Arrays
    expected: Arrays


@dataclass(frozen=True, slots=True)
class GraphUnderTest:
    """What is verified.

    Attributes:
        graph: as written.
        checkpoint: what the graph was written from, in fp32 whatever the graph's precision.
        heads: of the graph.
        max_tokens: the longest sequence that the graph may be asked for.
    """

    graph: Graph
    checkpoint: Checkpoint
    heads: Sequence[Head]
    max_tokens: int

    @property
    def spec(self) -> GraphSpec:
        """What the graph takes."""
        return GraphSpec(
            self.graph.layout,
            tuple(head.name for head in self.heads),
            token_types=self.checkpoint.model.config.type_vocab_size > 0,
            pooling=self.checkpoint.recipe.pooling,
        )


def verify(folder: Path, subject: GraphUnderTest, session: Session | None = None) -> Parity:
    """Run graph and torch over every cell of the grid, and write the golden file.

    Args:
        folder: where the graph lies, and where the golden file goes.
        subject: see `GraphUnderTest`.
        session: runs the graph; `open_session` if not given.

    Raises:
        ExportError: an output differs from torch's by more than the tolerance.
    """
    graph = subject.graph
    session = session or open_session(folder / graph.file, graph.layout)
    most = subject.max_tokens
    lengths = tuple(sorted({min(length, most) for length in (*_SHORT_LENGTHS, most)}))
    rng = np.random.default_rng(0)
    tolerance, golden_file = TOLERANCES[graph.precision], GOLDEN_FILES[graph.precision]
    worst: dict[str, float] = {}
    golden = []
    everything = [head.name for head in subject.heads]
    for batch in _BATCHES:
        for length in lengths:
            case = _make_case(rng, subject, _sizes(rng, graph.layout, batch, length), everything)
            _compare(session, case, f"batch {batch} x {length} tokens", tolerance, worst)
            if batch == 2 and length in _GOLDEN_LENGTHS:
                inputs, outputs = _as_lists(case.feeds), _as_lists(case.expected)
                golden.append({"feeds": inputs, "outputs": outputs})
    # Each head alone, and none: a head that is not asked for must cost nothing and break nothing.
    sizes = np.full(2, min(16, most), np.int32)
    for alone in (*([name] for name in everything), []):
        case = _make_case(rng, subject, sizes, alone)
        cell = f"{alone[0] if alone else 'no head'} alone"
        _compare(session, case, cell, tolerance, worst)
    (folder / golden_file).write_text(json.dumps(golden))
    return Parity(
        tolerance=tolerance,
        batches=_BATCHES,
        lengths=lengths,
        max_error=worst,
        golden_file=golden_file,
    )


def _compare(
    session: Session, case: _Case, cell: str, tolerance: float, worst: dict[str, float]
) -> None:
    """Run a case; raise if an output is off, and keep the worst error of each output."""
    outputs = dict(zip(case.expected, session.run(list(case.expected), case.feeds), strict=True))
    for name, error in errors(outputs, case.expected, tolerance).items():
        worst[name] = max(worst.get(name, 0.0), error)
        if error > tolerance:
            raise ExportError(
                f"parity: {name} at {cell} differs from torch by {error:.2e}, "
                f"more than {tolerance:.0e}"
            )


def _sizes(rng: np.random.Generator, layout: Layout, batch: int, length: int) -> Int32:
    """Return the tokens of each sequence: all alike, or in the packed layout up to the first's."""
    sizes = np.full(batch, length, np.int32)
    if layout is Layout.PACKED:
        sizes[1:] = rng.integers(min(_SHORT_LENGTHS), length, batch - 1, endpoint=True)
    return sizes


@torch.no_grad()
def _make_case(
    rng: np.random.Generator, subject: GraphUnderTest, sizes: Int32, asked: Collection[str]
) -> _Case:
    """Return random tokens between ``[CLS]`` and ``[SEP]``, and torch's outputs for them."""
    checkpoint, codec = subject.checkpoint, BatchCodec(subject.spec)
    batch = [_random_encoding(rng, checkpoint, int(size), asked) for size in sizes]
    rows = _hidden_rows(checkpoint.model, batch, subject.graph.layout)
    expected = torch_outputs(checkpoint.model, checkpoint.recipe, rows, batch, codec)
    return _Case(codec.pack(batch), expected)


def _hidden_rows(model: Model, batch: Sequence[Encoding], layout: Layout) -> torch.Tensor:
    """Return torch's hidden states [T, H] of a batch.

    In the dense layout all sequences have one length and run together. In the packed layout each
    sequence runs by itself, so torch sees neither the layout nor the other sequences.
    """
    calls = [batch] if layout is Layout.DENSE else [[encoding] for encoding in batch]
    states = []
    for call in calls:
        ids, types = (
            torch.from_numpy(np.stack(arrays).astype(np.int64))
            for arrays in ([e.input_ids for e in call], [e.token_type_ids for e in call])
        )
        states.append(model(ids, types).flatten(0, 1))
    return torch.cat(states)


def _random_encoding(
    rng: np.random.Generator, checkpoint: Checkpoint, tokens: int, asked: Collection[str]
) -> Encoding:
    tokenizer = checkpoint.tokenizer
    ids = rng.integers(0, tokenizer.size, tokens, dtype=np.int32)
    ids[0], ids[-1] = tokenizer.cls_id, tokenizer.sep_id
    second = min(1, max(0, checkpoint.model.config.type_vocab_size - 1))
    types = np.where(np.arange(tokens) > tokens // 2, second, 0).astype(np.int32)
    requests = {name: EXPORT_HEADS[name].sample(rng, tokens) for name in asked}
    return Encoding(ids, types, requests)


def _as_lists(arrays: Arrays) -> dict[str, object]:
    return {name: array.tolist() for name, array in arrays.items()}
