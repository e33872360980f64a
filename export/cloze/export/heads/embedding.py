"""Embedding: the recipe, which is the head's module, its poolings, graph and gate figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor

from cloze.export.errors import ExportError
from cloze.export.graph.builder import GraphBuilder
from cloze.export.heads.embedding_steps import Step
from cloze.export.heads.head import ExportHead, HeadGraph, of_sentences
from cloze.export.measure.pairs import similarity
from cloze.export.measure.scorer import Scorer
from cloze.export.measure.texts import GateTexts
from cloze.model_store.heads import Pooling, embedding
from cloze.model_store.heads.embedding import EmbeddingRequest
from cloze.model_store.layouts import Layout, Placement

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
    """Write one vector per sequence, [E, S, H] -> [E, H].

    Args:
        g: the graph.
        sequences: real tokens, [E, S, H].
        first: the first position to pool, [E]; "": 0.
        pooling: the pooling.
    """
    axis = g.weight("axis_1", np.array([1], np.int64))
    match pooling:
        case Pooling.LAST:
            return g.op("Gather", [sequences, g.weight("last", np.array(-1, np.int64))], axis=1)
        case Pooling.CLS if not first:
            return g.op("Gather", [sequences, g.weight("first", np.array(0, np.int64))], axis=1)
        case Pooling.MEAN if not first:
            return g.op("ReduceMean", [sequences, axis], keepdims=0)
        case Pooling.MAX if not first:
            return g.op("ReduceMax", [sequences, axis], keepdims=0)
    zero, one = (g.weight(f"number_{n}", np.array(n, np.int64)) for n in (0, 1))
    length = g.op("Squeeze", [g.op("Shape", [sequences], start=1, end=2)])
    positions = g.op("Range", [zero, length, one])  # [S]
    column = (
        g.op("Unsqueeze", [g.op("Cast", [first], to=TensorProto.INT64), axis])  # [E, 1]
        if first
        else g.weight("first_column", np.zeros((1, 1), np.int64))
    )
    is_first = pooling is Pooling.CLS
    counts = g.op("Equal" if is_first else "GreaterOrEqual", [positions, column])  # [E, S]
    last_axis = g.weight("axis_2", np.array([2], np.int64))
    if pooling is Pooling.MAX:
        lowest = g.weight("lowest", np.array(-np.inf, np.float32))
        real = g.op("Where", [g.op("Unsqueeze", [counts, last_axis]), sequences, lowest])
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
    axis = g.weight("axis_1", np.array([1], np.int64))
    if recipe.pooling is Pooling.MAX:
        return g.op("ReduceMax", [sequences, axis], keepdims=0)
    weights = g.op("Unsqueeze", [graph.input(embedding.POOL_WEIGHTS), axis])  # [E, 1, I]
    return g.op("Squeeze", [g.op("MatMul", [weights, sequences]), axis])


def _reference(
    recipe: EmbeddingRecipe, states: Tensor, requests: Sequence[Any], placement: Placement
) -> dict[str, Tensor]:
    rows = states[-1]
    starts = placement.starts.tolist()
    pooled = [
        recipe.pool(rows[None, starts[i] : starts[i + 1]], getattr(request, "first", 0))
        for i, request in enumerate(requests)
        if request is not None
    ]
    no_rows = rows.new_zeros(0, recipe.dimensions(rows.shape[1]))
    return {embedding.EMBEDDINGS.name: torch.cat([*pooled, no_rows])}


def _measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the cosines of both models' embeddings, and with scored pairs the change of STS."""
    cosines = []
    for one, other in of_sentences((checkpoint, graph), embedding.HEAD.name, texts):
        with np.errstate(invalid="ignore"):  # a vector of zeros gives NaN, and NaN fails the gate
            cosines.append((one @ other) / (np.linalg.norm(one) * np.linalg.norm(other)))
    figures = {
        "embedding_cosine_mean": float(np.mean(cosines)),
        "embedding_cosine_least": float(np.min(cosines)),
    }
    if texts.scored_pairs:
        tokens = min(_PAIR_TOKENS, texts.max_tokens)
        before, after = (
            similarity(texts.scored_pairs, texts.tokenizer, scorer, tokens)
            for scorer in (checkpoint, graph)
        )
        figures["sts_spearman_change"] = after - before
    return figures


EXPORT_HEAD: Final = ExportHead(
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
