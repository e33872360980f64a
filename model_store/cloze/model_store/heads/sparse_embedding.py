"""Sparse embedding: one weight per word of the vocabulary for a text, most of them zero.

The weight of a word is ``log(1 + relu(logit))`` of the masked-language-model head, and its maximum
over the tokens of the text. The head returns the largest weights.

Source: Formal et al. 2021, "SPLADE v2", equation 6.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cloze.model_store.heads.head import GraphSpec, Head, HeadRequest, Outputs
from cloze.model_store.layouts import Feeds, Placement
from cloze.model_store.tensors import TensorSpec

SPARSE_ROWS: Final = TensorSpec(
    "sparse_rows",
    "int32",
    ("U", "W"),
    "rows of `hidden` per sequence, W for the longest; a shorter one repeats its first row",
)
SPARSE_TOP_K: Final = TensorSpec("sparse_top_k", "int64", (1,), "weights per sequence, J")
SPARSE_WEIGHTS: Final = TensorSpec(
    "sparse_weights", "float32", ("U", "J"), "the largest weights, in descending order"
)
SPARSE_IDS: Final = TensorSpec("sparse_ids", "int64", ("U", "J"), "the words of the weights")


@dataclass(frozen=True, slots=True)
class SparseEmbeddingRequest(HeadRequest):
    """Return the largest weights of a sequence.

    Attributes:
        tokens: number of tokens of the sequence, all of which the head expands to the vocabulary.
        top_k: most weights to return.
    """

    tokens: int
    top_k: int

    @property
    def vocabulary_rows(self) -> int:  # type: ignore[override]  # a property stands for the constant
        """Number of tokens."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class SparseEmbeddingResult:
    """The positive weights of one sequence.

    Attributes:
        weights: [k] float32, in descending order.
        ids: [k] int64, the vocabulary ids of ``weights``.
    """

    weights: NDArray[np.float32]
    ids: NDArray[np.int64]


def _pack(
    requests: Sequence[SparseEmbeddingRequest | None], placement: Placement, _: GraphSpec
) -> Feeds:
    asked = [(i, request) for i, request in enumerate(requests) if request is not None]
    chosen = [i for i, _ in asked]
    return {
        SPARSE_ROWS.name: sequence_rows(placement, chosen),
        SPARSE_TOP_K.name: np.array([max([1, *(r.top_k for _, r in asked)])], np.int64),
    }


def sequence_rows(placement: Placement, chosen: Sequence[int]) -> NDArray[np.int32]:
    """Return the rows [U, W] of ``hidden`` of sequences; a shorter one repeats its first row.

    Args:
        placement: the places of all sequences of a batch.
        chosen: indices of the sequences.
    """
    starts, lengths = placement.starts[chosen][:, None], placement.lengths[chosen][:, None]
    columns = np.arange(int(lengths.max(initial=1)), dtype=np.int32)
    rows: NDArray[np.int32] = starts + np.where(columns < lengths, columns, np.int32(0))
    return rows


def _unpack(
    requests: Sequence[SparseEmbeddingRequest | None], _: Placement, outputs: Outputs
) -> list[SparseEmbeddingResult | None]:
    rows = iter(zip(outputs[SPARSE_WEIGHTS.name], outputs[SPARSE_IDS.name], strict=True))
    results: list[SparseEmbeddingResult | None] = []
    for request in requests:
        if request is None:
            results.append(None)
            continue
        weights, ids = next(rows)
        count = min(request.top_k, int(np.count_nonzero(weights > 0)))
        results.append(SparseEmbeddingResult(weights[:count], ids[:count]))
    return results


HEAD: Final = Head(
    name="sparse_embedding",
    task="sparse",
    inputs=(SPARSE_ROWS, SPARSE_TOP_K),
    outputs=(SPARSE_WEIGHTS, SPARSE_IDS),
    request=SparseEmbeddingRequest,
    result=SparseEmbeddingResult,
    pack=_pack,
    unpack=_unpack,
    ranked={SPARSE_IDS.name: SPARSE_WEIGHTS.name},
    largest_request=lambda rows: SparseEmbeddingRequest(tokens=rows, top_k=5),
    rows=lambda asked: asked.top_k,
)
