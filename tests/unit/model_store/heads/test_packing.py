"""What each head puts into a graph's inputs and takes from its outputs, with numbers by hand."""

from typing import Any

import numpy as np
import pytest

from cloze.model_store.batch import placement_of
from cloze.model_store.heads import (
    HEADS,
    GraphSpec,
    HeadRequest,
    embedding,
    entities,
    masked_lm,
    sparse_embedding,
)
from cloze.model_store.heads.entities import EntityRequest
from cloze.model_store.heads.head import Pooling
from cloze.model_store.heads.masked_lm import MaskedLMRequest
from cloze.model_store.heads.multi_vector import LateInteraction
from cloze.model_store.heads.sparse_embedding import SparseEmbeddingRequest, sequence_rows
from cloze.model_store.layouts import Layout

# Three sequences: rows 0 to 2, 3 to 4 and 5 to 8 of `hidden`.
PLACEMENT = placement_of(Layout.PACKED, [3, 2, 4])
GRAPH = GraphSpec(Layout.PACKED, tuple(HEADS), True, Pooling.MEAN, layers=2)
DENSE = GraphSpec(Layout.DENSE, tuple(HEADS), True, Pooling.MEAN, layers=2)


def packed(head: Any, *requests: Any, graph: GraphSpec = GRAPH) -> dict[str, list[Any]]:
    return {n: array.tolist() for n, array in head.pack(requests, PLACEMENT, graph).items()}


def test_masks_are_rows_of_the_batch_and_targets_belong_to_their_masks() -> None:
    first = MaskedLMRequest([1, 2], top_k=3, targets=[7, 8, 9])
    last = MaskedLMRequest([3], top_k=5, targets=[4])
    assert packed(masked_lm.HEAD, first, None, last) == {
        "mask_rows": [1, 2, 8],
        "top_k": [5],
        "target_masks": [0, 0, 0, 1, 1, 1, 2],
        "target_ids": [7, 8, 9, 7, 8, 9, 4],
    }


def test_a_batch_without_masks_has_no_rows_and_one_prediction() -> None:
    assert packed(masked_lm.HEAD, None, None, None) == {
        "mask_rows": [],
        "top_k": [1],
        "target_masks": [],
        "target_ids": [],
    }
    assert packed(masked_lm.HEAD, MaskedLMRequest([0]), None, None)["top_k"] == [1]


def test_vocabulary_rows_are_what_a_request_expands() -> None:
    assert MaskedLMRequest([4, 6, 9]).vocabulary_rows == 3
    assert SparseEmbeddingRequest(tokens=12, top_k=5).vocabulary_rows == 12
    assert HeadRequest().vocabulary_rows == 0
    for head in HEADS.values():
        assert head.largest_request(6).vocabulary_rows in (0, 6)


@pytest.mark.parametrize(
    ("pooling", "rows", "weights"),
    [
        (Pooling.CLS, [[0], [3]], [[1], [1]]),
        (Pooling.MEAN, [[0, 1, 2], [3, 4, 3]], [[1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0]]),
        (Pooling.MEAN_SQRT_LENGTH, [[0, 1, 2], [3, 4, 3]], [[3**-0.5] * 3, [2**-0.5, 2**-0.5, 0]]),
        (Pooling.MAX, [[0, 1, 2], [3, 4, 3]], None),
        (Pooling.LAST, [[2], [4]], [[1], [1]]),
        (Pooling.WEIGHTED_MEAN, [[0, 1, 2], [3, 4, 3]], [[1 / 6, 2 / 6, 3 / 6], [1 / 3, 2 / 3, 0]]),
    ],
)
def test_pooled_rows_and_their_weights(
    pooling: Pooling, rows: list[list[int]], weights: list[list[float]] | None
) -> None:
    feeds = embedding.pool(PLACEMENT.starts[:2], PLACEMENT.lengths[:2], pooling)
    assert feeds["pool_rows"].tolist() == rows
    assert feeds["pool_rows"].dtype == np.int32
    if weights is None:
        assert feeds.keys() == {"pool_rows"}
    else:
        np.testing.assert_allclose(feeds["pool_weights"], weights, rtol=1e-6)
        assert feeds["pool_weights"].dtype == np.float32


def test_positions_keep_their_weights_where_a_prompt_is_left_out() -> None:
    firsts = np.array([1, 0], np.int32)
    starts, lengths = PLACEMENT.starts[:2], PLACEMENT.lengths[:2]
    feeds = embedding.pool(starts, lengths, Pooling.WEIGHTED_MEAN, firsts)
    assert feeds["pool_rows"].tolist() == [[1, 2], [3, 4]]
    weights = [[2 / 5, 3 / 5], [1 / 3, 2 / 3]]
    np.testing.assert_allclose(feeds["pool_weights"], weights, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "differ"),
    [
        ({}, False),
        ({"filling": 3}, True),
        ({"skipped_ids": (1,)}, True),
        ({"query_marker": 1}, True),
        ({"query_marker": 1, "document_marker": 1}, False),
        ({"document_tokens": 9}, True),
    ],
    ids=str,
)
def test_roles_differ_in_whatever_moves_vectors(options: dict[str, Any], differ: bool) -> None:
    given: dict[str, Any] = {"dimensions": 4, "query_tokens": 8, "document_tokens": 8} | options
    assert LateInteraction(**given).roles_differ is differ


def test_sparse_rows_repeat_the_first_row_of_a_shorter_sequence() -> None:
    assert sequence_rows(PLACEMENT, [1, 2]).tolist() == [[3, 4, 3, 3], [5, 6, 7, 8]]
    assert sequence_rows(PLACEMENT, []).shape == (0, 1)
    few, many = SparseEmbeddingRequest(2, 3), SparseEmbeddingRequest(4, 9)
    feeds = packed(sparse_embedding.HEAD, None, few, many)
    assert feeds["sparse_top_k"] == [9]
    assert feeds["sparse_rows"] == [[3, 4, 3, 3], [5, 6, 7, 8]]
    assert packed(sparse_embedding.HEAD, None, None, None)["sparse_top_k"] == [1]


def test_sparse_results_have_positive_weights_up_to_the_limit_of_each_request() -> None:
    outputs = {
        "sparse_weights": np.array([[3.0, 2.0, 1.0], [3.0, 0.0, 0.0]], np.float32),
        "sparse_ids": np.array([[30, 20, 10], [31, 21, 11]]),
    }
    two, nothing, one = sparse_embedding.HEAD.unpack(
        [SparseEmbeddingRequest(3, 2), None, SparseEmbeddingRequest(4, 3)], PLACEMENT, outputs
    )
    assert nothing is None
    assert (two.ids.tolist(), two.weights.tolist()) == ([30, 20], [3, 2])
    assert (one.ids.tolist(), one.weights.tolist()) == ([31], [3])


def test_the_scores_of_a_text_keep_neither_padding_nor_other_scores_in_memory() -> None:
    scores = np.arange(2 * 4 * 3 * 5, dtype=np.float32).reshape(2, 4, 3, 5)
    few, many = EntityRequest((1,), (1, 2)), EntityRequest((1, 2, 3, 4), (1, 2, 3, 4, 5))
    results = entities.HEAD.unpack([few, None, many], PLACEMENT, {"entity_scores": scores})
    assert results[1] is None
    for result, expected in ((results[0], scores[0, :1, :, :2]), (results[2], scores[1])):
        np.testing.assert_array_equal(result.array, expected)
        assert result.array.base is None
