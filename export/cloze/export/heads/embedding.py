"""Embeddings of texts, tokens and layers. Their recipe is the module: pooling, steps, figures."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
import torch
import torch.nn.functional as F
from onnx import TensorProto
from torch import Tensor, nn

from cloze.export.errors import ExportError
from cloze.export.graph.builder import GraphBuilder, layer_norm, linear
from cloze.export.heads.head import (
    ExportHead,
    HeadBatch,
    HeadGraph,
    SampleSizes,
    compared,
    cosines,
    figure,
    mean_cosine,
    token_rows,
)
from cloze.export.measure.pairs import similarity
from cloze.export.measure.scorer import Scorer
from cloze.export.measure.texts import GateTexts
from cloze.model_store.heads import Pooling, embedding, layer_embedding, token_embedding
from cloze.model_store.heads.embedding import EmbeddingRequest
from cloze.model_store.heads.layer_embedding import LayerEmbeddingRequest
from cloze.model_store.layouts import Layout

# ---- sentence-transformers' modules after the pooling --------------------------------------------

_SMALLEST_LENGTH = 1e-12
"""A shorter vector is divided by this length, as by `F.normalize`."""


def _operator(name: str, **attributes: Any) -> Callable[[GraphBuilder, str], str]:
    return lambda g, x: g.op(name, [x], **attributes)


def _clip(least: float, most: float) -> Callable[[GraphBuilder, str], str]:
    return lambda g, x: g.op("Clip", [x, g.number(least), g.number(most)])


DENSE_ACTIVATIONS: Final[Mapping[str, Callable[[GraphBuilder, str], str]]] = {
    "Identity": lambda _, x: x,
    "Tanh": _operator("Tanh"),
    "ReLU": _operator("Relu"),
    "GELU": _operator("Gelu"),
    "SiLU": lambda g, x: g.op("Mul", [x, g.op("Sigmoid", [x])]),
    "Sigmoid": _operator("Sigmoid"),
    "ELU": _operator("Elu"),
    "SELU": _operator("Selu"),
    "LeakyReLU": _operator("LeakyRelu", alpha=0.01),
    "Softplus": _operator("Softplus"),
    "Softsign": _operator("Softsign"),
    "Mish": _operator("Mish"),
    "Hardswish": _operator("HardSwish"),
    "CELU": _operator("Celu"),
    "ReLU6": _clip(0.0, 6.0),
    "Hardtanh": _clip(-1.0, 1.0),
    "Hardsigmoid": _operator("HardSigmoid", alpha=1 / 6, beta=0.5),
    "Hardshrink": _operator("Shrink", lambd=0.5, bias=0.0),
    "Softshrink": _operator("Shrink", lambd=0.5, bias=0.5),
    "Tanhshrink": lambda g, x: g.op("Sub", [x, g.op("Tanh", [x])]),
    "LogSigmoid": lambda g, x: g.op("Neg", [g.op("Softplus", [g.op("Neg", [x])])]),
    "Softmax": _operator("Softmax", axis=1),
    "LogSoftmax": _operator("LogSoftmax", axis=1),
    "Softmin": lambda g, x: g.op("Softmax", [g.op("Neg", [x])], axis=1),
}
"""Writes each activation of ``torch.nn`` without weights or arguments, by the name of its class.

RReLU, which is random in training, and GLU, which halves the vector, are not among them.
"""

_OF_ALL_NUMBERS: Final = frozenset({"Softmax", "LogSoftmax", "Softmin"})
"""The activations whose numbers depend on all numbers of the vector."""


class Step(nn.Module, ABC):
    """A module after the pooling, which maps [E, D] to [E, D']."""

    @abstractmethod
    def write(self, g: GraphBuilder, x: str, name: str) -> str:
        """Write the module."""

    @property
    def dimensions(self) -> int | None:
        """D'; None: as many as before."""
        return None


class Projection(Step):
    """A dense layer (sentence-transformers' ``Dense``), with an optional residual connection."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: str = "Identity",
        residual: Tensor | bool = False,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0])
        self.linear.weight.data = weight.float()
        self.linear.bias.data = torch.zeros(weight.shape[0]) if bias is None else bias.float()
        self.activation = activation
        dimension = {"dim": 1} if activation in _OF_ALL_NUMBERS else {}
        self.function: nn.Module = getattr(nn, activation)(**dimension)
        self.adds_input = residual is not False
        self.residual: nn.Linear | None = None
        if isinstance(residual, Tensor):
            self.residual = nn.Linear(residual.shape[1], residual.shape[0], bias=False)
            self.residual.weight.data = residual.float()

    @property
    def dimensions(self) -> int:
        """See `Step`."""
        return self.linear.out_features

    def forward(self, pooled: Tensor) -> Tensor:
        """Project ``pooled`` [E, D] to [E, D']."""
        projected: Tensor = self.function(self.linear(pooled))
        if not self.adds_input:
            return projected
        added: Tensor = pooled if self.residual is None else self.residual(pooled)
        return projected + added

    def write(self, g: GraphBuilder, x: str, name: str) -> str:
        """See `Step`."""
        projected = DENSE_ACTIVATIONS[self.activation](g, linear(g, x, name, self.linear))
        if not self.adds_input:
            return projected
        if self.residual is not None:
            x = g.op("MatMul", [x, g.weight(f"{name}.residual", self.residual.weight.t())])
        return g.op("Add", [projected, x])


class Norm(Step):
    """sentence-transformers' ``LayerNorm``."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(len(weight))
        self.norm.weight.data, self.norm.bias.data = weight.float(), bias.float()

    def forward(self, pooled: Tensor) -> Tensor:
        """Normalise ``pooled`` [E, D]."""
        return self.norm(pooled)  # type: ignore[no-any-return]

    def write(self, g: GraphBuilder, x: str, name: str) -> str:
        """See `Step`."""
        return layer_norm(g, x, name, self.norm)


class UnitLength(Step):
    """sentence-transformers' ``Normalize`` before another module."""

    def forward(self, pooled: Tensor) -> Tensor:
        """Return ``pooled`` [E, D] with rows of length 1."""
        return F.normalize(pooled, dim=1, eps=_SMALLEST_LENGTH)

    def write(self, g: GraphBuilder, x: str, name: str) -> str:  # noqa: ARG002
        """See `Step`."""
        length = g.op("ReduceL2", [x, g.ints(1)], keepdims=1)
        return g.op("Div", [x, g.op("Max", [length, g.number(_SMALLEST_LENGTH)])])


# ---- embeddings of texts -------------------------------------------------------------------------

_PAIR_TOKENS = 128


@dataclass(frozen=True, slots=True)
class EmbeddingRecipe:
    """How hidden states become an embedding.

    The default is the usual recipe for an encoder without one: mean pooling and length 1.

    Attributes:
        further_poolings: poolings whose vectors are joined to that of the first one.
        steps: the modules after the pooling.
        max_tokens: the longest sequence of the checkpoint's tuning; None: the encoder's limit.
        prompts: texts to put before an input, by name.
        default_prompt: the name of the prompt for requests without a prompt; None: no prompt.
        include_prompt: whether the start token and the tokens of a prompt are pooled.
    """

    pooling: Pooling = Pooling.MEAN
    steps: tuple[Step, ...] = ()
    normalize: bool = True
    max_tokens: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    further_poolings: tuple[Pooling, ...] = ()
    include_prompt: bool = True

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        """All poolings, in the order of their vectors."""
        return (self.pooling, *self.further_poolings)

    def pool(self, hidden: Tensor, first: int = 0) -> Tensor:
        """Return the embeddings [E, D], not normalised, of ``hidden`` [E, S, H] without padding.

        Args:
            first: the first position to pool; 0 if the recipe includes prompts.
        """
        first = 0 if self.include_prompt else first
        vectors = torch.cat([pool(hidden, pooling, first) for pooling in self.poolings], 1)
        for step in self.steps:
            vectors = cast(Tensor, step(vectors))
        return vectors

    def dimensions(self, hidden_size: int) -> int:
        """Return D, the number of dimensions of an embedding."""
        sizes = [step.dimensions for step in self.steps if step.dimensions is not None]
        return sizes[-1] if sizes else hidden_size * len(self.poolings)


def pool(hidden: Tensor, pooling: Pooling, first: int = 0) -> Tensor:
    """Return one vector per sequence [E, H] of ``hidden`` [E, S, H] without padding.

    Args:
        first: the first position to pool. The positions keep their weights.
    """
    hidden = hidden[:, first:]
    match pooling:
        case Pooling.MEAN:
            return hidden.mean(1)
        case Pooling.CLS:
            return hidden[:, 0]
        case Pooling.LAST:
            return hidden[:, -1]
        case Pooling.MAX:
            return hidden.amax(1)
        case Pooling.MEAN_SQRT_LENGTH:
            return hidden.sum(1).div(hidden.shape[1] ** 0.5)
        case Pooling.WEIGHTED_MEAN:
            weights = torch.arange(1, hidden.shape[1] + 1, device=hidden.device) + first
            return (hidden * weights[:, None]).sum(1) / weights.sum()


def _write(recipe: EmbeddingRecipe, graph: HeadGraph) -> None:
    g = graph.g
    packed = graph.layout is Layout.PACKED
    pooled = _pool_packed(recipe, graph) if packed else _pool_dense(recipe, graph)  # [E, H]
    for number, step in enumerate(recipe.steps):
        pooled = step.write(g, pooled, f"projection.{number}")
    size = recipe.dimensions(graph.config.hidden_size)
    graph.output(pooled, embedding.EMBEDDINGS, D=size)


def _pool_dense(recipe: EmbeddingRecipe, graph: HeadGraph) -> str:
    """Pool sequences of ``hidden [B, S, H]``; all rows are real tokens."""
    g = graph.g
    chosen = graph.input(embedding.EMBED_SEQUENCES)
    sequences = g.op("Gather", [graph.hidden, chosen], axis=0)  # [E, S, H]
    first = "" if recipe.include_prompt else graph.input(embedding.EMBED_FIRST)
    vectors = [_pooled(g, sequences, first, pooling) for pooling in recipe.poolings]
    return vectors[0] if len(vectors) == 1 else g.op("Concat", vectors, axis=1)


def _pooled(g: GraphBuilder, sequences: str, first: str, pooling: Pooling) -> str:
    """Write one vector per sequence, [E, S, H] -> [E, H], of the positions from ``first`` on."""
    axis = g.ints(1)
    match pooling:
        case Pooling.LAST:
            return g.op("Gather", [sequences, g.number(-1)], axis=1)
        case Pooling.CLS if not first:
            return g.op("Gather", [sequences, g.number(0)], axis=1)
        case Pooling.MEAN if not first:
            return g.op("ReduceMean", [sequences, axis], keepdims=0)
        case Pooling.MAX if not first:
            return g.op("ReduceMax", [sequences, axis], keepdims=0)
    one = g.number(1)
    length = g.op("Squeeze", [g.op("Shape", [sequences], start=1, end=2)])
    positions = g.op("Range", [g.number(0), length, one])  # [S]
    column = (
        g.op("Unsqueeze", [g.op("Cast", [first], to=TensorProto.INT64), axis])  # [E, 1]
        if first
        else g.weight("first_column", np.zeros((1, 1), np.int64))
    )
    is_first = pooling is Pooling.CLS
    counts = g.op("Equal" if is_first else "GreaterOrEqual", [positions, column])  # [E, S]
    last_axis = g.ints(2)
    if pooling is Pooling.MAX:
        columns = g.op("Unsqueeze", [counts, last_axis])
        real = g.op("Where", [columns, sequences, g.number(-math.inf)])
        return g.op("ReduceMax", [real, axis], keepdims=0)
    weights = g.op("Cast", [counts], to=TensorProto.FLOAT)
    if pooling is Pooling.WEIGHTED_MEAN:
        numbers = g.op("Cast", [g.op("Add", [positions, one])], to=TensorProto.FLOAT)
        weights = g.op("Mul", [weights, numbers])
    weighted = g.op("Mul", [sequences, g.op("Unsqueeze", [weights, last_axis])])
    total = g.op("ReduceSum", [weighted, axis], keepdims=0)
    divisor = g.op("ReduceSum", [weights, axis])  # [E, 1]
    if pooling is Pooling.MEAN_SQRT_LENGTH:
        divisor = g.op("Sqrt", [divisor])
    return g.op("Div", [total, divisor])


def _pool_packed(recipe: EmbeddingRecipe, graph: HeadGraph) -> str:
    """Pool rows of ``hidden [T, H]``, one list of rows per embedding."""
    g = graph.g
    if recipe.further_poolings:
        raise ExportError(
            f"a packed graph has one pooling, not {' + '.join(recipe.poolings)}; "
            "leave out --precision fp16"
        )
    sequences = graph.gather(embedding.POOL_ROWS)  # [E, I, H]
    axis = g.ints(1)
    if recipe.pooling is Pooling.MAX:
        return g.op("ReduceMax", [sequences, axis], keepdims=0)
    weights = g.op("Unsqueeze", [graph.input(embedding.POOL_WEIGHTS), axis])  # [E, 1, I]
    return g.op("Squeeze", [g.op("MatMul", [weights, sequences]), axis])


def _reference(recipe: EmbeddingRecipe, batch: HeadBatch) -> dict[str, Tensor]:
    pooled = [
        recipe.pool(batch.rows[None, own], getattr(request, "first", 0))
        for own, request in batch.asked()
    ]
    no_rows = batch.rows.new_zeros(0, recipe.dimensions(batch.rows.shape[1]))
    return {embedding.EMBEDDINGS.name: torch.cat([*pooled, no_rows])}


def _measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the cosines of both models' embeddings, and with scored pairs the change of STS."""
    agreement = cosines(compared((checkpoint, graph), embedding.HEAD.name, texts.sentences()))
    figures = {
        "embedding_cosine_mean": float(agreement.mean()),
        "embedding_cosine_least": float(agreement.min()),
    }
    if texts.scored_pairs:
        tokens = min(_PAIR_TOKENS, texts.max_tokens)
        before, after = (
            similarity(texts.scored_pairs, texts.tokenizer, scorer, tokens)
            for scorer in (checkpoint, graph)
        )
        figures["sts_spearman_change"] = after - before
    return figures


EMBEDDING: Final = ExportHead(
    head=embedding.HEAD,
    module=None,
    write=_write,
    reference=_reference,
    measure=_measure,
    sample=lambda _, sizes: EmbeddingRequest(sizes.tokens // 3),
    limits={
        "embedding_cosine_mean": 0.995,
        "embedding_cosine_least": 0.98,
        "sts_spearman_change": -0.003,
    },
)


# ---- embeddings of tokens ------------------------------------------------------------------------


def _write_tokens(_: Any, graph: HeadGraph) -> None:
    rows = graph.gather(token_embedding.HIDDEN_ROWS)
    graph.output(rows, token_embedding.TOKEN_EMBEDDINGS, H=graph.config.hidden_size)


TOKEN_EMBEDDING: Final = ExportHead(
    head=token_embedding.HEAD,
    module=None,
    write=_write_tokens,
    reference=lambda _, batch: {
        token_embedding.TOKEN_EMBEDDINGS.name: batch.rows[token_rows(batch)]
    },
    measure=figure("token_embedding_cosine_mean", token_embedding.HEAD, mean_cosine),
    limits={"token_embedding_cosine_mean": 0.98},
)


# ---- embeddings of layers ------------------------------------------------------------------------

_POOLINGS = (Pooling.MEAN, Pooling.CLS, Pooling.MAX)


def _write_layers(_: Any, graph: HeadGraph) -> None:
    """Add up the requested rows layer by layer, so that one layer at a time is in memory."""
    g = graph.g
    axis_1, axis_2 = g.ints(1), g.ints(2)
    row_numbers = graph.input(layer_embedding.LAYER_ROWS)  # [X, Y]
    count = len(graph.states)
    weights = g.op("Unsqueeze", [graph.input(layer_embedding.LAYER_WEIGHTS), axis_2])  # [X, Z, 1]
    by_layer = g.op("Split", [weights], outputs=count, axis=1, num_outputs=count)
    total = ""
    for layer, states in enumerate(graph.states):
        rows = graph.rows_of(states, row_numbers)  # [E, L, H]
        weight = by_layer if layer == 0 else f"{by_layer}_{layer}"  # [E, 1, 1]
        weighted = g.op("Mul", [rows, weight])
        total = g.op("Add", [total, weighted]) if total else weighted
    row_weights = graph.input(layer_embedding.LAYER_ROW_WEIGHTS)
    summed = g.op("MatMul", [g.op("Unsqueeze", [row_weights, axis_1]), total])  # [E, 1, H]
    size = graph.config.hidden_size
    graph.output(g.op("Squeeze", [summed, axis_1]), layer_embedding.LAYER_SUMS, H=size)
    largest = g.op("ReduceMax", [total, axis_1], keepdims=0)
    graph.output(largest, layer_embedding.LAYER_MAXIMA, H=size)


def _reference_layers(_: Any, batch: HeadBatch) -> dict[str, Tensor]:
    states, size = batch.states, batch.states.shape[2]
    sums, maxima = [states.new_zeros(0, size)], [states.new_zeros(0, size)]
    for rows, request in batch.asked():
        for layers in request.vectors:
            own = states[:, rows]  # [N, S, H]
            total = torch.stack([own[layer] * weight for layer, weight in layers.items()]).sum(0)
            # For max pooling, the weights of all rows are 0.
            is_max = request.pooling is Pooling.MAX
            sums.append(total.new_zeros(1, size) if is_max else pool(total[None], request.pooling))
            maxima.append(total.amax(0)[None])
    return {
        layer_embedding.LAYER_SUMS.name: torch.cat(sums),
        layer_embedding.LAYER_MAXIMA.name: torch.cat(maxima),
    }


def _sample_layers(rng: np.random.Generator, sizes: SampleSizes) -> LayerEmbeddingRequest:
    """Return a request for all states, with other weights for each, and for one of them alone."""
    weights = rng.uniform(0.5, 1.5, sizes.layers + 1)
    weighted = {layer: float(weight) for layer, weight in enumerate(weights)}
    alone = {int(rng.integers(sizes.layers + 1)): 1.0}
    return LayerEmbeddingRequest([weighted, alone], _POOLINGS[rng.integers(len(_POOLINGS))])


def _measure_layers(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the mean cosine of both models' vectors, of the state that agrees least."""
    name = layer_embedding.HEAD.name
    states = range(checkpoint.layers + 1)
    request = LayerEmbeddingRequest([{layer: 1.0} for layer in states], Pooling.MEAN)
    pairs = compared((checkpoint, graph), name, texts.sentences(), request)
    by_layer = [mean_cosine([(a[[n]], b[[n]]) for a, b in pairs]) for n in states]
    return {"layer_embedding_cosine_mean": float(np.min(by_layer))}


LAYER_EMBEDDING: Final = ExportHead(
    head=layer_embedding.HEAD,
    module=None,
    write=_write_layers,
    reference=_reference_layers,
    sample=_sample_layers,
    measure=_measure_layers,
    limits={"layer_embedding_cosine_mean": 0.98},
    by_default=False,
)
