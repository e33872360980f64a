"""Layer embedding: graph and gate figure. The head has no weights of its own."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from cloze.export.heads.embedding import pool
from cloze.export.heads.head import ExportHead, HeadGraph, SampleSizes, mean_cosine, of_sentences
from cloze.export.measure.scorer import Scorer
from cloze.export.measure.texts import GateTexts
from cloze.model_store.heads import Pooling, layer_embedding
from cloze.model_store.heads.layer_embedding import LayerEmbeddingRequest
from cloze.model_store.layouts import Placement

_POOLINGS = (Pooling.MEAN, Pooling.CLS, Pooling.MAX)


def _write(_: Any, graph: HeadGraph) -> None:
    """Add up the requested rows layer by layer, so that one layer at a time is in memory."""
    g = graph.g
    axis_1, axis_2 = (g.weight(f"axis_{n}", np.array([n], np.int64)) for n in (1, 2))
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


def _reference(
    _: Any,
    states: Tensor,
    requests: Sequence[LayerEmbeddingRequest | None],
    placement: Placement,
) -> dict[str, Tensor]:
    starts, size = placement.starts.tolist(), states.shape[2]
    sums, maxima = [states.new_zeros(0, size)], [states.new_zeros(0, size)]
    for i, request in enumerate(requests):
        for layers in request.vectors if request is not None else ():
            assert request is not None
            own = states[:, starts[i] : starts[i + 1]]  # [N, S, H]
            total = torch.stack([own[layer] * weight for layer, weight in layers.items()]).sum(0)
            # For max pooling, the weights of all rows are 0.
            is_max = request.pooling is Pooling.MAX
            sums.append(total.new_zeros(1, size) if is_max else pool(total[None], request.pooling))
            maxima.append(total.amax(0)[None])
    return {
        layer_embedding.LAYER_SUMS.name: torch.cat(sums),
        layer_embedding.LAYER_MAXIMA.name: torch.cat(maxima),
    }


def _sample(rng: np.random.Generator, sizes: SampleSizes) -> LayerEmbeddingRequest:
    """Return a request for all states, with other weights for each, and for one of them alone."""
    weights = rng.uniform(0.5, 1.5, sizes.layers + 1)
    weighted = {layer: float(weight) for layer, weight in enumerate(weights)}
    alone = {int(rng.integers(sizes.layers + 1)): 1.0}
    return LayerEmbeddingRequest([weighted, alone], _POOLINGS[rng.integers(len(_POOLINGS))])


def _measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the mean cosine of both models' vectors, of the layer that agrees least.

    The embeddings count as a layer.
    """
    name = layer_embedding.HEAD.name
    states = range(checkpoint.layers + 1)
    request = LayerEmbeddingRequest([{layer: 1.0} for layer in states], Pooling.MEAN)
    pairs = [*of_sentences((checkpoint, graph), name, texts, request)]
    by_layer = [mean_cosine([(a[[n]], b[[n]]) for a, b in pairs]) for n in states]
    return {"layer_embedding_cosine_mean": float(np.min(by_layer))}


EXPORT_HEAD: Final = ExportHead(
    head=layer_embedding.HEAD,
    module=None,
    write=_write,
    reference=_reference,
    sample=_sample,
    measure=_measure,
    limits={"layer_embedding_cosine_mean": 0.98},
    by_default=False,
)
