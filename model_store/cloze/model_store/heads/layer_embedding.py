"""Layer embedding: the hidden states of chosen layers, pooled into vectors.

A vector is a weighted sum of a sequence's hidden states, layer by layer, pooled over its tokens.
The result is the vectors [n, H] of a sequence, in the order of the request.

Source: Devlin et al. 2019, table 7, which compares layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cloze.model_store.heads.embedding import pool
from cloze.model_store.heads.head import ArrayResult, GraphSpec, Head, HeadRequest, Outputs, Pooling
from cloze.model_store.layouts import Feeds, Placement
from cloze.model_store.tensors import TensorSpec

LAYER_ROWS: Final = TensorSpec(
    "layer_rows", "int32", ("X", "Y"), "rows of `hidden` per vector, Y for the longest sequence"
)
LAYER_ROW_WEIGHTS: Final = TensorSpec(
    "layer_row_weights", "float32", ("X", "Y"), "weights of the rows for sums, 0 for padding"
)
LAYER_WEIGHTS: Final = TensorSpec(
    "layer_weights", "float32", ("X", "Z"), "weights of the embeddings, then of the Z - 1 layers"
)
LAYER_SUMS: Final = TensorSpec(
    "layer_sums", "float32", ("X", "H"), "the weighted sum over rows and layers"
)
LAYER_MAXIMA: Final = TensorSpec(
    "layer_maxima", "float32", ("X", "H"), "the maximum over rows of the weighted sum over layers"
)


@dataclass(frozen=True, slots=True)
class LayerEmbeddingRequest(HeadRequest):
    """Pool hidden states into vectors.

    Attributes:
        vectors: for each vector, layer -> weight. Layer 0 is the embeddings, N the last layer.
        pooling: how the tokens become one vector.
    """

    vectors: Sequence[dict[int, float]]
    pooling: Pooling


def _pack(
    requests: Sequence[LayerEmbeddingRequest | None], placement: Placement, graph: GraphSpec
) -> Feeds:
    asked = [(i, request) for i, request in enumerate(requests) if request is not None]
    counts = [len(request.vectors) for _, request in asked]
    sequences = np.repeat(np.array([i for i, _ in asked], np.int32), counts)
    starts, lengths = placement.starts[sequences], placement.lengths[sequences]
    longest = int(lengths.max(initial=1))
    columns = np.arange(longest, dtype=np.int32)
    rows = starts[:, None] + np.where(columns < lengths[:, None], columns, np.int32(0))
    row_weights = np.zeros(rows.shape, np.float32)
    weights = np.zeros((len(rows), graph.layers + 1), np.float32)
    vector = 0
    for (i, request), count in zip(asked, counts, strict=True):
        if request.pooling is not Pooling.MAX:
            own = slice(i, i + 1)
            pooled = pool(placement.starts[own], placement.lengths[own], request.pooling)
            own_weights = pooled["pool_weights"][0]
            row_weights[vector : vector + count, : len(own_weights)] = own_weights
        for layers in request.vectors:
            weights[vector, list(layers)] = list(layers.values())
            vector += 1
    return {
        LAYER_ROWS.name: rows,
        LAYER_ROW_WEIGHTS.name: row_weights,
        LAYER_WEIGHTS.name: weights,
    }


def _unpack(
    requests: Sequence[LayerEmbeddingRequest | None], _: Placement, outputs: Outputs
) -> list[ArrayResult | None]:
    results: list[ArrayResult | None] = []
    first = 0
    for request in requests:
        if request is None:
            results.append(None)
            continue
        end = first + len(request.vectors)
        output = LAYER_MAXIMA if request.pooling is Pooling.MAX else LAYER_SUMS
        results.append(ArrayResult(outputs[output.name][first:end]))
        first = end
    return results


HEAD: Final = Head(
    name="layer_embedding",
    task="embed-layers",
    inputs=(LAYER_ROWS, LAYER_ROW_WEIGHTS, LAYER_WEIGHTS),
    outputs=(LAYER_SUMS, LAYER_MAXIMA),
    request=LayerEmbeddingRequest,
    pack=_pack,
    unpack=_unpack,
    largest_request=lambda _: LayerEmbeddingRequest([{0: 1.0}] * 4, Pooling.MEAN),
    rows=lambda asked: len(asked.vectors),
    model_sizes=lambda sizes: {"H": sizes.hidden_size, "Z": sizes.layers + 1},
)
