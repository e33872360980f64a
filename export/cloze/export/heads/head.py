"""Export's contract of a head, which every module of this package fulfils."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor, nn

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import Encoder
from cloze.export.blocks.layer import ACTIVATIONS, Activation, make_norm
from cloze.export.families import HeadSpec
from cloze.export.graph.builder import GraphBuilder, layer_norm, onnx_type
from cloze.export.graph.linear_ops import LinearOps
from cloze.export.graph.trunk import TrunkGraph
from cloze.export.measure.scorer import PLAIN, Floats, Row, Scorer, row_arrays
from cloze.export.measure.texts import GateTexts
from cloze.model_store.heads import Head, HeadRequest
from cloze.model_store.heads.head import Frozen
from cloze.model_store.layouts import Layout, Placement
from cloze.model_store.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class HeadGraph:
    """The graph to which a head is added.

    Attributes:
        states: names of the outputs of the embeddings and of each layer, [B, S, H] or [T, H] each.
        rows: name of the trunk's output in the shape [T, H], or [R, H] of the rows that are kept.
        kept: numbers of these rows for inputs of row numbers, by the names of the inputs.
    """

    linear_ops: LinearOps
    layout: Layout
    states: Sequence[str]
    rows: str
    config: EncoderConfig
    kept: Mapping[str, str] = field(default_factory=dict)

    @property
    def g(self) -> GraphBuilder:
        """The builder of the graph."""
        return self.linear_ops.g

    @property
    def hidden(self) -> str:
        """The name of the trunk's output in the layout's shape: [B, S, H] or [T, H]."""
        return self.states[-1]

    def input(self, tensor: TensorSpec) -> str:
        """Declare an input of the head."""
        return self.g.declare_input(tensor, self.layout)

    def output(self, value: str, tensor: TensorSpec, **sizes: int) -> None:
        """Declare a value as an output; ``sizes`` replace letters of the tensor's shape."""
        shape = [sizes.get(size, size) if isinstance(size, str) else size for size in tensor.shape]
        self.g.output(value, tensor.name, onnx_type(tensor), shape)

    def gather(self, tensor: TensorSpec) -> str:
        """Declare an input of row numbers; return those rows of ``hidden [T, H]`` in float32."""
        return self._gathered(self.rows, self.kept.get(tensor.name) or self.input(tensor))

    def _gathered(self, rows: str, numbers: str) -> str:
        return self.linear_ops.to_float32(self.g.op("Gather", [rows, numbers], axis=0))

    def rows_of(self, states: str, numbers: str) -> str:
        """Return rows of one of ``states``, given by its name, in float32."""
        if states == self.hidden:
            return self._gathered(self.rows, numbers)
        return self._gathered(flat_rows(self.g, self.layout, states, self.config), numbers)


def flat_rows(g: GraphBuilder, layout: Layout, states: str, config: EncoderConfig) -> str:
    """Return hidden states in the shape [T, H]."""
    if layout is Layout.PACKED:
        return states
    return g.op("Reshape", [states, g.ints(-1, config.hidden_size)])  # [B, S, H] -> [T, H]


@dataclass(frozen=True, slots=True)
class HeadSetup:
    """What a new head's module is made for.

    Attributes:
        options: the head's section of the manifest; None: it has none.
    """

    config: EncoderConfig
    encoder: Encoder
    spec: HeadSpec
    options: Any = None


class Transform(nn.Module):
    """A linear layer, an activation and a norm before a classifier of tokens."""

    def __init__(self, setup: HeadSetup) -> None:
        super().__init__()
        config = setup.config
        size = config.hidden_size
        self.dense = nn.Linear(size, size, config.has_bias("head"))
        self.activation = ACTIVATIONS[config.head_activation or config.activation]
        self.norm = make_norm(config)

    def forward(self, rows: Tensor) -> Tensor:
        """Transform rows [R, H]."""
        return self.norm(self.activation.forward(self.dense(rows)))  # type: ignore[no-any-return]

    def write(self, g: GraphBuilder, rows: str, name: str) -> str:
        """Write the transform of rows [R, H]; the names of weights begin with ``name``."""
        rows = write_activated(g, rows, f"{name}.transform.dense", self.dense, self.activation)
        return layer_norm(g, rows, f"{name}.transform.norm", self.norm)


def write_activated(
    g: GraphBuilder, rows: str, name: str, linear: nn.Linear, activation: Activation
) -> str:
    """Write ``activation(linear(rows))`` in fp32."""
    product = g.op("MatMul", [rows, g.weight(f"{name}.weight", linear.weight.t())])
    bias = "" if linear.bias is None else g.weight(f"{name}.bias", linear.bias)
    return activation.write(g, product, bias)


@dataclass(frozen=True, slots=True)
class HeadBatch:
    """The hidden states of a batch, and what the batch asks of one head.

    Attributes:
        states: [N, T, H], the embeddings and the output of each layer.
        requests: the request of each sequence; None if the sequence does not ask the head.
    """

    states: Tensor
    requests: Sequence[Any]
    placement: Placement

    @property
    def rows(self) -> Tensor:
        """The output [T, H] of the last layer."""
        return self.states[-1]

    def asked(self) -> list[tuple[slice, Any]]:
        """Return the rows of each sequence that asks the head, and its request."""
        sequences = zip(pairwise(self.placement.starts.tolist()), self.requests, strict=True)
        return [(slice(*rows), request) for rows, request in sequences if request is not None]


@dataclass(frozen=True, slots=True)
class SampleSizes:
    """The sizes that a sample request must keep to.

    Attributes:
        options: the heads' sections of the manifest, by head name.
    """

    tokens: int
    vocabulary: int
    layers: int
    options: Mapping[str, Frozen] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExportHead:
    """Export's part of one head.

    Attributes:
        module: setup -> a new torch module; None: the head has no module of its own.
        module_of: name of the head whose module this head uses; None: it uses none but its own.
        of_family: whether the head's tensors are among those that the families name.
        write_keys: (module, trunk) -> None; sets `TrunkGraph.keys` before the trunk is written.
        rows: module -> inputs of row numbers: the head reads no other row; None: it may read all.
        write: (module, graph) -> None; writes the head into the graph.
        reference: (module, batch) -> the graph's outputs by name, computed with torch.
        measure: (checkpoint, graph, texts) -> figures that compare the graph with the checkpoint,
            for the quality gate.
        limits: the lowest accepted value of each figure.
        by_default: whether a checkpoint with this head is exported for it unless the user chooses.
        fine_tuned: whether a checkpoint with this head is by default exported only for its
            fine-tuned heads.
        classes: ends of the names of transformers' classes that have this head, its own one first.
        needs_class: whether ``config.json`` must name one of them, because another head has tensors
            of the same names.
        task_type: PEFT's name of the task of adapters with this head; None: it has none.
        read_options: ``config.json`` -> the head's section in the manifest; None: no section.
        incomplete: first part of tensor names -> the note for a checkpoint that has only these
            tensors of the head.
    """

    head: Head
    module: Callable[[HeadSetup], nn.Module] | None
    write: Callable[[Any, HeadGraph], None]
    reference: Callable[[Any, HeadBatch], dict[str, Tensor]]
    measure: Callable[[Scorer, Scorer, GateTexts], dict[str, float]]
    limits: Mapping[str, float]
    sample: Callable[[np.random.Generator, SampleSizes], HeadRequest] = lambda *_: HeadRequest()
    module_of: str | None = None
    of_family: bool = True
    rows: Callable[[Any], Sequence[TensorSpec]] | None = None
    write_keys: Callable[[Any, TrunkGraph], None] | None = None
    by_default: bool = True
    fine_tuned: bool = False
    classes: tuple[str, ...] = ()
    needs_class: bool = False
    task_type: str | None = None
    read_options: Callable[[Mapping[str, Any]], Frozen] | None = None
    incomplete: Mapping[str, str] = field(default_factory=dict)


def cls_rows(batch: HeadBatch) -> list[int]:
    """Return the ``[CLS]`` row of each sequence with a request."""
    return [rows.start for rows, _ in batch.asked()]


def token_rows(batch: HeadBatch) -> list[int]:
    """Return all rows of each sequence with a request."""
    return [row for rows, _ in batch.asked() for row in range(rows.start, rows.stop)]


def on_rows(
    rows_of: Callable[[HeadBatch], list[int]], output: TensorSpec
) -> Callable[[Any, HeadBatch], dict[str, Tensor]]:
    """Return the reference of a head whose one output is its module on some rows."""
    return lambda module, batch: {output.name: module(batch.rows[rows_of(batch)])}


def compared(
    scorers: tuple[Scorer, Scorer],
    head: str,
    rows: Sequence[Row],
    request: HeadRequest = PLAIN,
) -> list[tuple[Floats, Floats]]:
    """Return what a head of two models computes of each row."""
    one, other = (row_arrays(scorer, head, rows, request) for scorer in scorers)
    return list(zip(one, other, strict=True))


def figure(
    name: str,
    head: Head,
    compare: Callable[[list[tuple[Floats, Floats]]], float],
    rows: Callable[[GateTexts], Sequence[Row]] = GateTexts.sentences,
    request: HeadRequest = PLAIN,
) -> Callable[[Scorer, Scorer, GateTexts], dict[str, float]]:
    """Return a measurement of one figure, which compares what two models compute of texts."""

    def measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
        return {name: compare(compared((checkpoint, graph), head.name, rows(texts), request))}

    return measure


def cosines(pairs: Iterable[tuple[Floats, Floats]]) -> Floats:
    """Return the cosines of pairs of vectors [H], or of the rows of pairs of arrays [n, H]."""
    one, other = map(np.vstack, zip(*pairs, strict=True))
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    with np.errstate(invalid="ignore"):  # a vector of zeros gives NaN, and NaN fails the gate
        values: Floats = np.vecdot(one, other) / lengths
    return values


def mean_cosine(pairs: Iterable[tuple[Floats, Floats]]) -> float:
    """Return the mean of the cosines of pairs."""
    return float(cosines(pairs).mean())


def mean_cosine_of_weights(pairs: Iterable[tuple[Floats, Floats]]) -> float:
    """Return the mean cosine of pairs of weights [n]; two vectors of zeros have the cosine 1."""
    values = []
    for one, other in pairs:
        lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
        no_weights = not (one.any() or other.any())
        values.append(float(np.vdot(one, other)) / lengths if lengths else float(no_weights))
    return float(np.mean(values))


def agreement(pairs: Iterable[tuple[Floats, Floats]]) -> float:
    """Return the share of pairs whose largest numbers along the first axis have the same places."""
    return float(np.mean([np.array_equal(a.argmax(0), b.argmax(0)) for a, b in pairs]))
