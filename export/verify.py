"""Compares a written graph with torch over a grid, and records golden outputs. What fails is not published."""

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from export.checkpoint import Checkpoint
from export.errors import ExportError
from export.models import Model
from model_store import interface as names
from model_store.manifest import Graph, Parity, Precision, Task
from model_store.parity import errors
from model_store.processor import int8_instructions, int8_settings

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # the official builds otherwise report to their maker from the import on
import onnxruntime as ort

GOLDEN_FILES = {Precision.FP32: "golden.json", Precision.INT8: "golden-int8.json"}

TOLERANCES = {Precision.FP32: 1e-4, Precision.INT8: 0.25}
"""fp32: several times the error that summing in another order makes in 24 layers. int8: enough to see that a graph is not what
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


def verify(folder: Path, graph: Graph, checkpoint: Checkpoint, tasks: Collection[Task], max_tokens: int) -> Parity:
    """Run graph and torch over every cell of the grid, with all heads in one batch, and write its golden file.

    Args:
        folder: where the graph lies, and where the golden file goes.
        graph: the graph that was written there.
        checkpoint: what it was written from, in fp32 whatever the graph's precision is.
        tasks: those it was written for.
        max_tokens: the longest sequence it may be asked for.

    Raises:
        ExportError: an output differs from torch's by more than the tolerance.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    for setting, value in int8_settings(int8_instructions()).items():
        options.add_session_config_entry(setting, value)
    session = ort.InferenceSession(folder / graph.file, options, providers=["CPUExecutionProvider"])
    lengths = tuple(sorted({min(length, max_tokens) for length in (*_SHORT_LENGTHS, max_tokens)}))
    rng = np.random.default_rng(0)
    tolerance, golden_file = TOLERANCES[graph.precision], GOLDEN_FILES[graph.precision]
    worst: dict[str, float] = {}
    golden = []
    for batch in _BATCHES:
        for length in lengths:
            case = _make_case(rng, checkpoint, tasks, batch, length)
            _compare(session, case, f"batch {batch} x {length} tokens", tolerance, worst)
            if batch == 2 and length in _GOLDEN_LENGTHS:
                golden.append({"feeds": _as_lists(case.feeds), "outputs": _as_lists(case.expected)})
    # Each head alone, and none: a head that is not asked for must cost nothing and break nothing.
    for alone in (*((task,) for task in tasks), ()):
        case = _make_case(rng, checkpoint, tasks, 2, min(16, max_tokens), asked=alone)
        _compare(session, case, f"{alone[0] if alone else 'no head'} alone", tolerance, worst)
    (folder / golden_file).write_text(json.dumps(golden))
    return Parity(tolerance=tolerance, batches=_BATCHES, lengths=lengths, max_error=worst, golden_file=golden_file)


def _compare(session: ort.InferenceSession, case: _Case, cell: str, tolerance: float, worst: dict[str, float]) -> None:
    outputs = dict(zip(case.expected, session.run(list(case.expected), case.feeds), strict=True))
    for name, error in errors(outputs, case.expected, tolerance).items():
        worst[name] = max(worst.get(name, 0.0), error)
        if error > tolerance:
            raise ExportError(f"parity: {name} at {cell} differs from torch by {error:.2e}, more than {tolerance:.0e}")


@torch.no_grad()
def _make_case(
    rng: np.random.Generator,
    checkpoint: Checkpoint,
    tasks: Collection[Task],
    batch: int,
    length: int,
    asked: Collection[Task] | None = None,
) -> _Case:
    """Random tokens between ``[CLS]`` and ``[SEP]``; each head asked for some rows, or for none if not ``asked``."""
    asked = tasks if asked is None else asked
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    ids = rng.integers(0, tokenizer.size, (batch, length), dtype=np.int32)
    ids[:, 0], ids[:, -1] = tokenizer.cls_id, tokenizer.sep_id
    feeds: Arrays = {names.INPUT_IDS: ids}
    types = None
    if model.config.type_vocab_size:
        second = min(1, model.config.type_vocab_size - 1)
        types = np.broadcast_to(np.where(np.arange(length) > length // 2, second, 0), ids.shape).astype(np.int32)
        feeds[names.TOKEN_TYPE_IDS] = types
    hidden = model(torch.from_numpy(ids), None if types is None else torch.from_numpy(types))  # [B, S, H]
    rows = hidden.flatten(0, 1)
    expected: Arrays = {}
    if Task.FILL_MASK in tasks:
        count = min(3 * batch, batch * length) if Task.FILL_MASK in asked else 0
        _ask_masked_lm(feeds, expected, model, rows, rng.choice(batch * length, count, replace=False).astype(np.int32))
    if Task.NSP in tasks:
        assert model.next_sentence is not None
        pair_rows = np.arange(batch if Task.NSP in asked else 0, dtype=np.int32) * np.int32(length)
        feeds[names.PAIR_ROWS] = pair_rows
        expected[names.PAIR_LOGITS] = model.next_sentence(rows[torch.from_numpy(pair_rows).long()]).numpy()
    if Task.EMBED in tasks:
        sequences = np.arange(batch if Task.EMBED in asked else 0, dtype=np.int32)[::-1].copy()
        feeds[names.EMBED_SEQUENCES] = sequences
        expected[names.EMBEDDINGS] = checkpoint.recipe.pool(hidden[torch.from_numpy(sequences).long()]).numpy()
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
