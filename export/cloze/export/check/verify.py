"""Compares a written graph with torch, and a rounded graph with its checkpoint.

A graph that fails is not published. `verify` compares a graph with torch on the same rounded
weights over a grid of batches, and records golden outputs. `pass_gate`, the quality gate, compares
it with the checkpoint before rounding, on texts.
"""

import json
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cloze.export.blocks.window import Window
from cloze.export.errors import ExportError
from cloze.export.graph.session import Session, open_session
from cloze.export.heads import EXPORT_HEADS
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.heads.head import SampleSizes
from cloze.export.load.checkpoint import Checkpoint
from cloze.export.measure.scorer import Scorer
from cloze.export.measure.texts import GateTexts
from cloze.export.model import SUFFIXES, Model, hidden_states, torch_outputs
from cloze.model_store.batch import BatchCodec, Encoding
from cloze.model_store.heads import GraphSpec, Head
from cloze.model_store.layouts import Int32, Layout
from cloze.model_store.manifest import Gate, Graph, Parity, Precision
from cloze.model_store.parity import output_errors

TOLERANCES = {Precision.FP32: 1e-4, Precision.INT8: 0.25, Precision.FP16: 0.03}
"""The largest accepted errors.

- fp32: several times the error of another order of summation in 24 layers.
- fp16: several times the rounding error in 12 layers.
- int8: small enough to detect a wrong graph. The gate decides whether the graph is good enough. A
  tighter comparison is impossible, even with the same integers in torch: a difference of 1e-7
  moves some value across the boundary between two integers, and after a few layers all values have
  moved (measured).
"""

_MOST_OF_TORCH = 4
"""The largest error of an fp32 graph beyond its tolerance, in errors of torch's own fp32.

Both are errors against the same model in fp64. They are large in models that multiply rounding
errors: without normalisation, a MobileBERT of random weights has states of 1e6 and more.
"""

_MOST_ROUNDING = 5e-3
"""The largest error of torch's own fp32. Beyond it, a wrong graph might be taken for rounding."""

_BATCHES = (1, 2, 8)
_SHORT_LENGTHS = (3, 16, 128)  # tokens; 3 is one word with [CLS] and [SEP]
_GOLDEN_LENGTHS = (3, 16)

_MOST_BATCH_TOKENS = 4096
"""The most tokens of a batch of several sequences.

Attention in torch may need memory for the square of a sequence's length, hence 8 sequences of
8,192 tokens are not run.
"""

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Case:
    """The inputs of one run of the graph, and torch's outputs for these inputs."""

    batch: Sequence[Encoding]
    feeds: Arrays
    expected: Arrays


@dataclass(frozen=True, slots=True)
class GraphUnderTest:
    """A graph to verify.

    Attributes:
        checkpoint: the graph's checkpoint, which torch runs in fp32 for every precision.
        max_tokens: the longest sequence that the graph must support.
        prefix: what the name of the golden file begins with.
    """

    graph: Graph
    checkpoint: Checkpoint
    heads: Sequence[Head]
    max_tokens: int
    prefix: str = ""

    @property
    def spec(self) -> GraphSpec:
        """The specification of the graph's inputs."""
        return GraphSpec(
            self.graph.layout,
            tuple(head.name for head in self.heads),
            token_types=self.checkpoint.model.config.type_vocab_size > 0,
            pooling=self.checkpoint.recipe.pooling,
            layers=self.checkpoint.model.config.layers,
            include_prompt=self.checkpoint.recipe.include_prompt,
            options=self.checkpoint.options,
        )


def verify(folder: Path, subject: GraphUnderTest, session: Session | None = None) -> Parity:
    """Run the graph and torch over every cell of the grid; write the golden file beside the graph.

    Raises:
        ExportError: an output differs from torch's by more than the tolerance.
    """
    graph = subject.graph
    session = session or open_session(folder / graph.file, graph.layout)
    longest = subject.max_tokens
    rng = np.random.default_rng(0)
    golden_file = f"{subject.prefix}golden{SUFFIXES[graph.precision]}.json"
    tolerances = [TOLERANCES[graph.precision]]
    worst: dict[str, float] = {}
    golden = []
    all_heads = [head.name for head in subject.heads]
    for batch, length in grid(longest, subject.checkpoint.model.config.window):
        sizes = _sizes(rng, graph.layout, batch, length)
        case = _make_case(rng, subject, sizes, all_heads)
        cell = f"batch {batch} x {length} tokens"
        tolerances.append(_compare(session, subject, case, cell, worst))
        if batch == 2 and length in _GOLDEN_LENGTHS:
            inputs, outputs = (
                {name: array.tolist() for name, array in arrays.items()}
                for arrays in (case.feeds, case.expected)
            )
            golden.append({"feeds": inputs, "outputs": outputs})
    # Each head alone, then no head: inputs with zero rows must not break the graph.
    sizes = np.full(2, min(16, longest), np.int32)
    for alone in (*([name] for name in all_heads), []):
        case = _make_case(rng, subject, sizes, alone)
        cell = f"{alone[0] if alone else 'no head'} alone"
        tolerances.append(_compare(session, subject, case, cell, worst))
    (folder / golden_file).write_text(json.dumps(golden))
    return Parity(tolerance=max(tolerances), max_error=worst, golden_file=golden_file)


def grid(longest: int, window: int | None) -> list[tuple[int, int]]:
    """Return the batches to verify, as numbers of sequences and of tokens of each.

    Args:
        longest: the most tokens of a sequence.
        window: the distance of local attention, whose graph depends on the length; None: none.
    """
    changes = () if window is None else Window(window).changes()
    lengths = sorted({min(length, longest) for length in (*_SHORT_LENGTHS, *changes, longest)})
    return [
        (batch, length)
        for batch in _BATCHES
        for length in lengths
        if batch == 1 or batch * length <= _MOST_BATCH_TOKENS
    ]


def _compare(
    session: Session, subject: GraphUnderTest, case: _Case, cell: str, worst: dict[str, float]
) -> float:
    """Run a case, update the largest error of each output, and return the tolerance of the case."""
    outputs = dict(zip(case.expected, session.run(list(case.expected), case.feeds), strict=True))
    tolerance = TOLERANCES[subject.graph.precision]
    errors = output_errors(outputs, case.expected, tolerance)
    for name, error in errors.items():
        if error > tolerance:
            problem = (
                f"parity: {name} at {cell} differs from torch by {error:.2e}, "
                f"more than {tolerance:.0e}"
            )
            if subject.graph.precision is not Precision.FP32:
                raise ExportError(problem)
            tolerance = _rounding_tolerance(subject, case, outputs, problem)
            errors = output_errors(outputs, case.expected, tolerance)
            break
    for name, error in errors.items():
        worst[name] = max(worst.get(name, 0.0), error)
    return tolerance


def _rounding_tolerance(
    subject: GraphUnderTest, case: _Case, outputs: Arrays, problem: str
) -> float:
    """Return the tolerance of a case if the graph rounds little worse than torch does in fp32."""
    checkpoint = subject.checkpoint
    model, recipe = deepcopy((checkpoint.model, checkpoint.recipe))
    for module in (model, *recipe.steps):
        module.double()
    exact = _expected(subject, model, recipe, case.batch)
    numbers = {name for name, array in exact.items() if array.dtype.kind == "f"}
    own = output_errors(case.expected, exact, 0.0)
    rounding = max(own[name] for name in numbers)
    if not rounding <= _MOST_ROUNDING:
        raise ExportError(
            f"{problem}; torch's own fp32 differs from fp64 by {rounding:.2e}, too much to verify "
            "a graph"
        )
    most = _MOST_OF_TORCH * rounding
    name, error = max(output_errors(outputs, exact, most).items(), key=lambda each: each[1])
    if error > most:
        raise ExportError(
            f"{problem}; {name} differs from fp64 by {error:.2e}, torch's own fp32 by "
            f"{rounding:.2e}"
        )
    return most + rounding


def _sizes(rng: np.random.Generator, layout: Layout, batch: int, length: int) -> Int32:
    """Return the length of each sequence: one length, or in the packed layout mixed lengths."""
    sizes = np.full(batch, length, np.int32)
    if layout is Layout.PACKED:
        sizes[1:] = rng.integers(min(_SHORT_LENGTHS), length, batch - 1, endpoint=True)
    return sizes


def _make_case(
    rng: np.random.Generator, subject: GraphUnderTest, sizes: Int32, asked: Collection[str]
) -> _Case:
    """Return a batch of random tokens between ``[CLS]`` and ``[SEP]``, and torch's outputs."""
    checkpoint = subject.checkpoint
    batch = [_random_encoding(rng, checkpoint, int(size), asked) for size in sizes]
    expected = _expected(subject, checkpoint.model, checkpoint.recipe, batch)
    return _Case(batch, BatchCodec(subject.spec).pack(batch).feeds, expected)


@torch.no_grad()
def _expected(
    subject: GraphUnderTest, model: Model, recipe: EmbeddingRecipe, batch: Sequence[Encoding]
) -> Arrays:
    """Return the outputs of a torch model, in its precision."""
    # In the packed layout each sequence runs alone, so the reference does not depend on the others.
    calls = [batch] if subject.graph.layout is Layout.DENSE else [[one] for one in batch]
    states = torch.cat([hidden_states(model, call) for call in calls], dim=1)
    packed = BatchCodec(subject.spec).pack(batch)
    return torch_outputs(model, recipe, states, packed, subject.spec.heads)


def _random_encoding(
    rng: np.random.Generator, checkpoint: Checkpoint, tokens: int, asked: Collection[str]
) -> Encoding:
    tokenizer = checkpoint.tokenizer
    ids = rng.integers(0, tokenizer.size, tokens, dtype=np.int32)
    ids[0], ids[-1] = tokenizer.special.cls, tokenizer.special.sep
    second = min(1, max(0, checkpoint.model.config.type_vocab_size - 1))
    types = np.where(np.arange(tokens) > tokens // 2, second, 0).astype(np.int32)
    model = checkpoint.model
    drawn = SampleSizes(tokens, tokenizer.size, model.config.layers, model.options)
    requests = {name: EXPORT_HEADS[name].sample(rng, drawn) for name in asked}
    return Encoding(ids, types, requests)


def pass_gate(
    checkpoint: Scorer, graph: Scorer, title: str, heads: Sequence[Head], texts: GateTexts
) -> Gate:
    """Compare a checkpoint with a graph of it; return the figures and their limits.

    Raises:
        ExportError: a figure is below its limit, or is NaN.
    """
    measured, limits = measure_gate(checkpoint, graph, heads, texts)
    for name, value in measured.items():
        if not value >= limits[name]:  # NaN fails too
            raise ExportError(
                f"the {title} loses too much of this checkpoint: {name} is {value:.4f} and must "
                f"be at least {limits[name]}; export a higher precision, or weights of a higher "
                "precision"
            )
    return Gate(measured=measured, limits=limits)


def measure_gate(
    original: Scorer, other: Scorer, heads: Sequence[Head], texts: GateTexts
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures of the gate for two scorers, and their limits."""
    measured: dict[str, float] = {}
    limits: dict[str, float] = {}
    for head in heads:
        export_head = EXPORT_HEADS[head.name]
        figures = export_head.measure(original, other, texts)
        measured |= figures
        limits |= {name: export_head.limits[name] for name in figures}
    return measured, limits
