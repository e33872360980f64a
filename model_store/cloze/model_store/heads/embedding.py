"""Embedding: the hidden states of a sequence pooled into one vector.

The result is the embedding [D].

Source: Reimers & Gurevych 2019, section 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cloze.model_store.heads.head import GraphSpec, Head, HeadRequest, Pooling, Requests
from cloze.model_store.heads.rows import unpack_rows
from cloze.model_store.layouts import Feeds, Int32, Layout, Placement
from cloze.model_store.tensors import TensorSpec

EMBED_SEQUENCES: Final = TensorSpec(
    "embed_sequences", "int32", ("E",), "indices of the sequences to pool, 0 to B - 1", "dense"
)
EMBED_FIRST: Final = TensorSpec(
    "embed_first",
    "int32",
    ("E",),
    "the first position to pool of each; only if the pooling leaves out prompts",
    "dense",
)
POOL_ROWS: Final = TensorSpec(
    "pool_rows",
    "int32",
    ("E", "I"),
    "rows of `hidden` per embedding, I for the longest",
    "packed",
)
POOL_WEIGHTS: Final = TensorSpec(
    "pool_weights",
    "float32",
    ("E", "I"),
    "row weights, 0 for padding; absent for max pooling",
    "packed",
)
EMBEDDINGS: Final = TensorSpec(
    "embeddings", "float32", ("E", "D"), "one vector of D numbers each, not normalised"
)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest(HeadRequest):
    """Return the embedding of a sequence.

    Attributes:
        first: the first position to pool. Only a graph whose pooling leaves out prompts heeds it.
    """

    first: int = 0


def _pack(requests: Requests, placement: Placement, graph: GraphSpec) -> Feeds:
    chosen = np.flatnonzero([request is not None for request in requests])
    firsts: Int32 | None = None
    if not graph.include_prompt:
        asked = [request for request in requests if request is not None]
        firsts = np.array([getattr(request, "first", 0) for request in asked], np.int32)
    if graph.layout is Layout.DENSE:
        feeds: Feeds = {EMBED_SEQUENCES.name: chosen.astype(np.int32)}
        return feeds if firsts is None else feeds | {EMBED_FIRST.name: firsts}
    assert graph.pooling is not None
    return pool(placement.starts[chosen], placement.lengths[chosen], graph.pooling, firsts)


def pool(starts: Int32, lengths: Int32, pooling: Pooling, firsts: Int32 | None = None) -> Feeds:
    """Return the rows of ``hidden`` to pool for each embedding, and the weight of each row.

    Args:
        starts: [E], the first row of each sequence to pool.
        lengths: [E], tokens of each sequence.
        pooling: how rows become one vector.
        firsts: [E], the first position to pool of each sequence; None: 0.

    Returns:
        ``pool_rows`` [E, L] and, except for max pooling, ``pool_weights`` [E, L]. A column beyond
        the end of a sequence repeats the sequence's first row with weight 0.
    """
    if firsts is None:
        firsts = np.zeros_like(starts)
    starts, lengths = starts + firsts, lengths - firsts
    one_row = pooling in (Pooling.CLS, Pooling.LAST)
    longest = 1 if one_row else int(lengths.max(initial=1))
    columns = np.arange(longest, dtype=np.int32)
    real = columns < lengths[:, None]
    first = starts + lengths - 1 if pooling is Pooling.LAST else starts
    rows = first[:, None] + np.where(real, columns, np.int32(0))
    feeds: Feeds = {POOL_ROWS.name: rows}
    if pooling is Pooling.WEIGHTED_MEAN:
        positions = real * (columns + 1 + firsts[:, None])
        weights = positions / positions.sum(1, keepdims=True)
        feeds[POOL_WEIGHTS.name] = weights.astype(np.float32)
    elif pooling is not Pooling.MAX:
        divisors: Mapping[Pooling, NDArray[Any]] = {
            Pooling.CLS: np.ones(len(lengths)),
            Pooling.LAST: np.ones(len(lengths)),
            Pooling.MEAN: lengths,
            Pooling.MEAN_SQRT_LENGTH: np.sqrt(lengths),
        }
        weights = real / divisors[pooling][:, None]
        feeds[POOL_WEIGHTS.name] = weights.astype(np.float32)
    return feeds


HEAD: Final = Head(
    name="embedding",
    task="embed",
    inputs=(EMBED_SEQUENCES, EMBED_FIRST, POOL_ROWS, POOL_WEIGHTS),
    outputs=(EMBEDDINGS,),
    request=EmbeddingRequest,
    pack=_pack,
    unpack=unpack_rows(EMBEDDINGS),
    model_sizes=lambda sizes: {"D": sizes.dimensions} if sizes.dimensions else {},
)
