"""Compares a written graph with torch over a grid, and records golden outputs. What fails is not published."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from export.checkpoint import Checkpoint
from export.errors import ExportError
from export.models import Model
from export.session import Session, open_session
from model_store import interface as names
from model_store import packing
from model_store.manifest import Graph, Layout, Parity, Precision, Task
from model_store.packing import Int32
from model_store.parity import errors

GOLDEN_FILES = {Precision.FP32: "golden.json", Precision.INT8: "golden-int8.json", Precision.FP16: "golden-fp16.json"}

TOLERANCES = {Precision.FP32: 1e-4, Precision.INT8: 0.25, Precision.FP16: 0.03}
"""fp32: several times the error that summing in another order makes in 24 layers. fp16: several times that of rounding in 12
layers. int8: enough to see that a graph is not what
it should be; whether it is good enough, the gate decides. No tighter comparison is to be had, not even with the same integers
in torch: 1e-7 moves some value over the edge between two integers, and after a few layers all have moved (measured)."""

_BATCHES = (1, 2, 8)
_SHORT_LENGTHS = (3, 16, 128)  # tokens; 3 is one word with [CLS] and [SEP]
_GOLDEN_LENGTHS = (3, 16)
_TOP_K = 5

Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class _Case:
    """One run: the graph's inputs, and torch's outputs for them."""

    feeds: Arrays
    expected: Arrays


def verify(
    folder: Path, graph: Graph, checkpoint: Checkpoint, tasks: Collection[Task], max_tokens: int, session: Session | None = None
) -> Parity:
    """Run graph and torch over every cell of the grid, with all heads in one batch, and write its golden file.

    Args:
        folder: where the graph lies, and where the golden file goes.
        graph: the graph that was written there.
        checkpoint: what it was written from, in fp32 whatever the graph's precision is.
        tasks: those it was written for.
        max_tokens: the longest sequence it may be asked for.
        session: runs it; `open_session` if not given.

    Raises:
        ExportError: an output differs from torch's by more than the tolerance.
    """
    session = session or open_session(folder / graph.file, graph.layout)
    lengths = tuple(sorted({min(length, max_tokens) for length in (*_SHORT_LENGTHS, max_tokens)}))
    rng = np.random.default_rng(0)
    tolerance, golden_file = TOLERANCES[graph.precision], GOLDEN_FILES[graph.precision]
    worst: dict[str, float] = {}
    golden = []
    for batch in _BATCHES:
        for length in lengths:
            sizes = _sizes(rng, graph.layout, batch, length)
            case = _make_case(rng, checkpoint, tasks, graph.layout, sizes)
            _compare(session, case, f"batch {batch} x {length} tokens", tolerance, worst)
            if batch == 2 and length in _GOLDEN_LENGTHS:
                golden.append({"feeds": _as_lists(case.feeds), "outputs": _as_lists(case.expected)})
    # Each head alone, and none: a head that is not asked for must cost nothing and break nothing.
    for alone in (*((task,) for task in tasks), ()):
        case = _make_case(rng, checkpoint, tasks, graph.layout, np.full(2, min(16, max_tokens), np.int32), asked=alone)
        _compare(session, case, f"{alone[0] if alone else 'no head'} alone", tolerance, worst)
    (folder / golden_file).write_text(json.dumps(golden))
    return Parity(tolerance=tolerance, batches=_BATCHES, lengths=lengths, max_error=worst, golden_file=golden_file)


def _compare(session: Session, case: _Case, cell: str, tolerance: float, worst: dict[str, float]) -> None:
    outputs = dict(zip(case.expected, session.run(list(case.expected), case.feeds), strict=True))
    for name, error in errors(outputs, case.expected, tolerance).items():
        worst[name] = max(worst.get(name, 0.0), error)
        if error > tolerance:
            raise ExportError(f"parity: {name} at {cell} differs from torch by {error:.2e}, more than {tolerance:.0e}")


def _sizes(rng: np.random.Generator, layout: Layout, batch: int, length: int) -> Int32:
    """Tokens of each sequence: all alike, or in the packed layout up to the first's."""
    sizes = np.full(batch, length, np.int32)
    if layout is Layout.PACKED:
        sizes[1:] = rng.integers(min(_SHORT_LENGTHS), length, batch - 1, endpoint=True)
    return sizes


@torch.no_grad()
def _make_case(
    rng: np.random.Generator,
    checkpoint: Checkpoint,
    tasks: Collection[Task],
    layout: Layout,
    sizes: Int32,
    asked: Collection[Task] | None = None,
) -> _Case:
    """Random tokens between ``[CLS]`` and ``[SEP]``; each head asked for some rows, or for none if not ``asked``."""
    asked = tasks if asked is None else asked
    model, tokenizer, packed = checkpoint.model, checkpoint.tokenizer, layout is Layout.PACKED
    starts = packing.starts_of(sizes)
    ids = rng.integers(0, tokenizer.size, starts[-1], dtype=np.int32)
    ids[starts[:-1]], ids[starts[1:] - 1] = tokenizer.cls_id, tokenizer.sep_id
    second = min(1, max(0, model.config.type_vocab_size - 1))
    types = np.concatenate([np.where(np.arange(size) > size // 2, second, 0) for size in sizes]).astype(np.int32)
    shape = (-1,) if packed else (len(sizes), -1)
    feeds: Arrays = {names.INPUT_IDS: ids.reshape(shape)}
    if model.config.type_vocab_size:
        feeds[names.TOKEN_TYPE_IDS] = types.reshape(shape)
    if packed:
        feeds |= packing.place(sizes)
    # Each sequence by itself, or all of them where they have one length.
    parts = np.split(np.arange(len(ids)), starts[1:-1]) if packed else [np.arange(len(ids)).reshape(shape)]
    states = [model(*(torch.from_numpy(array[np.atleast_2d(part)]) for array in (ids, types))) for part in parts]
    rows = torch.cat([state.flatten(0, 1) for state in states])  # [T, H]
    expected: Arrays = {}
    if Task.FILL_MASK in tasks:
        count = min(3 * len(sizes), len(ids)) if Task.FILL_MASK in asked else 0
        _ask_masked_lm(feeds, expected, model, rows, rng.choice(len(ids), count, replace=False).astype(np.int32))
    if Task.NSP in tasks:
        assert model.next_sentence is not None
        pair_rows = starts[:-1] if Task.NSP in asked else starts[:0]
        feeds[names.PAIR_ROWS] = pair_rows
        expected[names.PAIR_LOGITS] = model.next_sentence(rows[torch.from_numpy(pair_rows).long()]).numpy()
    if Task.EMBED in tasks:
        sequences = np.arange(len(sizes) if Task.EMBED in asked else 0, dtype=np.int32)[::-1].copy()
        if packed:
            feeds |= packing.pool(starts[sequences], sizes[sequences], checkpoint.recipe.pooling)
        else:
            feeds[names.EMBED_SEQUENCES] = sequences
        pooled = [checkpoint.recipe.pool(rows[None, starts[i] : starts[i + 1]]) for i in sequences]
        width = checkpoint.recipe.dimensions(model.config.hidden_size)
        expected[names.EMBEDDINGS] = torch.cat([*pooled, torch.zeros(0, width)]).numpy()
    if Task.QA in tasks:
        assert model.span is not None
        expected[names.SPAN_LOGITS] = model.span(rows).numpy()
    return _Case(feeds, expected)


def _ask_masked_lm(feeds: Arrays, expected: Arrays, model: Model, rows: torch.Tensor, mask_rows: NDArray[np.int32]) -> None:
    assert model.masked_lm is not None
    logits = model.masked_lm(rows[torch.from_numpy(mask_rows).long()])  # [M, V]
    top = logits.topk(_TOP_K, dim=1)
    feeds |= {
        names.MASK_ROWS: mask_rows,
        names.TOP_K: np.array([_TOP_K], np.int64),
        names.TARGET_MASKS: np.repeat(np.arange(len(mask_rows), dtype=np.int32), _TOP_K),
        names.TARGET_IDS: top.indices.flatten().to(torch.int32).numpy(),
    }
    expected |= {
        names.TOP_LOGITS: top.values.numpy(),
        names.TOP_IDS: top.indices.numpy(),
        names.LOGSUMEXP: logits.logsumexp(1).numpy(),
        names.TARGET_LOGITS: top.values.flatten().numpy(),
    }


def _as_lists(arrays: Arrays) -> dict[str, object]:
    return {name: array.tolist() for name, array in arrays.items()}
