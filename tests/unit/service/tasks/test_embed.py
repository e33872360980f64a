"""Embeddings of texts, spans, tokens and words: what is run, and vectors from outputs by hand."""

import math
from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads import ArrayResult, Pooling
from cloze.model_store.heads.sparse_embedding import SparseEmbeddingResult
from cloze.service.tasks.similarity import SimilarityInputs, TokenPair
from cloze.service.tasks.task import TextUsage
from tests.support.refusals import refused
from tests.support.task_model import (
    CLS,
    ID,
    SEP,
    VOCABULARY,
    context,
    decoded,
    ids,
    limited,
    prepared,
    tokens,
)

# Embeddings read 10 tokens, 8 of them of the text.
NINE = "a b c d e f g h i"


def vectors(*rows: list[float]) -> list[dict[str, Any]]:
    return [{"embedding": ArrayResult(np.array(row, np.float32))} for row in rows]


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "dimensions": 4, "pooling": "mean", "normalize": True, "max_tokens": 10, "projected": False,
    } | changes  # fmt: skip


def test_a_vector_has_length_one_if_the_model_says_so() -> None:
    request = prepared("embed", "the door")
    assert tokens(request) == ["[CLS] the door [SEP]"]
    assert list(request.encodings[0].requests) == ["embedding"]
    assert (request.truncated, request.usage) == (0, None)
    outputs = vectors([3, 0, 4, 0])
    np.testing.assert_allclose(decoded("embed", request, outputs), [[0.6, 0, 0.8, 0]], rtol=1e-6)
    raw = prepared("embed", ["the door"], normalize=False)
    assert decoded("embed", raw, outputs).tolist() == [[3, 0, 4, 0]]
    model = context(embedding=recipe(normalize=False))
    raw = prepared("embed", "the", model)
    assert decoded("embed", raw, outputs, model).tolist() == [[3, 0, 4, 0]]
    scaled = prepared("embed", "the", model, normalize=True)
    np.testing.assert_allclose(decoded("embed", scaled, outputs, model)[0][0], 0.6, rtol=1e-6)


def test_a_vector_of_zeros_stays_zero() -> None:
    assert decoded("embed", prepared("embed", "the"), vectors([0] * 4)).tolist() == [[0] * 4]
    similar = prepared("similarity", compared("a"))
    assert decoded("similarity", similar, vectors([0] * 4, [1, 0, 0, 0])) == [0]


def test_leading_dimensions_are_kept_and_then_scaled() -> None:
    request = prepared("embed", "the", dimensions=2)
    np.testing.assert_allclose(decoded("embed", request, vectors([3, 4, 9, 9])), [[0.6, 0.8]])
    span = prepared("embed", "the", spans=[(0, 3)], dimensions=2)
    rows = np.array([[9, 9, 9, 9], [3, 4, 5, 6], [9, 9, 9, 9]], np.float32)
    result = decoded("embed", span, [{"token_embedding": ArrayResult(rows)}])
    np.testing.assert_allclose(result, [[0.6, 0.8]], rtol=1e-6)
    whole = prepared("embed", "the", dimensions=4, normalize=False)
    assert decoded("embed", whole, vectors([3, 4, 9, 9])).tolist() == [[3, 4, 9, 9]]


def test_ids_are_a_text_with_or_without_its_special_tokens() -> None:
    assert tokens(prepared("embed", ids("the door"))) == ["[CLS] the door [SEP]"]
    assert tokens(prepared("embed", [[CLS, *ids("the door"), SEP], "a"])) == [
        "[CLS] the door [SEP]",
        "[CLS] a [SEP]",
    ]
    for half in ([CLS, *ids("the door")], [*ids("the door"), SEP], [SEP], [CLS]):
        assert prepared("embed", [half]).encodings[0].input_ids.tolist() == [CLS, *half, SEP]
    last = len(VOCABULARY) - 1
    assert prepared("embed", [[0, last]]).encodings[0].input_ids.tolist() == [CLS, 0, last, SEP]


def test_a_prompt_is_put_before_ids_as_before_a_text() -> None:
    """Else the name of their space would name a prompt that no vector has."""
    request = prepared("embed", [[CLS, *ids("a b"), SEP]], prompt_name="query")
    assert tokens(request) == ["[CLS] ask : a b [SEP]"]
    assert prepared("embed", [ids("a b")]).vectors != request.vectors


def test_windows_have_the_mean_vector_by_their_tokens() -> None:
    request = prepared("embed", ["a", f"{NINE} j k l"], long_text="window", normalize=False)
    result = decoded("embed", request, vectors([1, 2, 3, 4], [9, 0, 0, 0], [0, 9, 0, 0]))
    np.testing.assert_allclose(result[1], [5, 4, 0, 0], rtol=1e-6)
    assert result.dtype == np.float32
    assert result[0].tolist() == [1, 2, 3, 4], "exactly that of the only window"


def layers_of(**parameters: Any) -> Any:
    return prepared("embed", "the", **parameters).encodings[0].requests


def test_layers_of_a_model_of_four() -> None:
    for layers, made in {
        "first": [{0: 1}],
        "second-to-last": [{3: 1}],
        "sum-last-four": [{1: 1, 2: 1, 3: 1, 4: 1}],
        "concat-last-four": [{1: 1}, {2: 1}, {3: 1}, {4: 1}],
        "sum-all": [{1: 1, 2: 1, 3: 1, 4: 1}],
    }.items():
        request = layers_of(layers=layers)["layer_embedding"]
        assert (request.vectors, request.pooling) == (made, Pooling.MEAN), layers
    assert layers_of(pooling="max", layers="first")["layer_embedding"].pooling is Pooling.MAX


def test_the_model_s_own_vectors_need_no_layers() -> None:
    assert list(layers_of(layers="last", pooling="mean")) == ["embedding"]
    other = layers_of(pooling="cls")["layer_embedding"]
    assert (other.vectors, other.pooling) == ([{4: 1.0}], Pooling.CLS)
    for parameters, recipe in (({"pooling": "max"}, ("max", "last")), ({}, ("mean", "last"))):
        vectors = prepared("embed", "the", **parameters).vectors
        assert vectors is not None
        assert (vectors.pooling, vectors.layers) == recipe, "it names the space"


def test_vectors_of_several_layers_are_joined() -> None:
    request = prepared("embed", "the", layers="concat-last-four", normalize=False)
    outputs = [{"layer_embedding": ArrayResult(np.arange(16, dtype=np.float32).reshape(4, 4))}]
    assert decoded("embed", request, outputs).tolist() == [list(range(16))]


def test_spans_are_the_means_of_their_tokens() -> None:
    # the: 0 to 3, red: 4 to 7, ##s: 7 to 8, door: 9 to 13
    request = prepared(
        "embed", "the reds door", spans=[(0, 3), (4, 8), (5, 10), (0, 13)], normalize=False
    )
    assert list(request.encodings[0].requests) == ["token_embedding"]
    rows = np.array([[90], [1], [2], [4], [9], [91]], np.float32)
    outputs = [{"token_embedding": ArrayResult(rows)}]
    result = decoded("embed", request, outputs)
    assert result.ravel().tolist() == [1, 3, 5, 4]
    assert result.dtype == np.float32


def test_spans_end_where_the_next_begins() -> None:
    request = prepared("embed", "the reds", spans=[(3, 5), (7, 8)], normalize=False)
    rows = np.array([[90], [1], [2], [4], [91]], np.float32)
    result = decoded("embed", request, [{"token_embedding": ArrayResult(rows)}])
    assert result.ravel().tolist() == [2, 4]


def test_vectors_of_tokens_with_their_places() -> None:
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    outputs = [{"token_embedding": ArrayResult(rows)}]
    request = prepared("embed-all", "the reds")
    assert request.usage is None
    assert decoded("embed-all", request, outputs)[0].tolist() == rows.tolist()
    request = prepared("embed-all", ["the reds"], return_offsets=True)
    [result] = decoded("embed-all", request, outputs)
    assert result.offsets == [None, (0, 3), (4, 7), (7, 8), None]
    request = prepared("embed-all", "the", return_offsets=True, prompt_name="query")
    assert request.state.offsets == [[None, None, None, (0, 3), None]]
    for side, first in (("right", 0), ("left", 2)):
        cut = prepared("embed-all", NINE, return_offsets=True, truncation_direction=side)
        assert cut.state.offsets[0][1:-1] == [(n, n + 1) for n in range(first, first + 16, 2)]
    assert prepared("embed-all", ids("the")).state.offsets is None


def test_words_of_a_text_with_their_weights() -> None:
    assert prepared("embed-sparse", "a").encodings[0].requests["sparse_embedding"].top_k == 50
    result = SparseEmbeddingResult(np.array([2.5, 0.5], np.float32), np.array(ids("door red")))
    for named in (True, False):
        request = prepared("embed-sparse", ["the door"], top_k=2, return_tokens=named)
        asked = request.encodings[0].requests["sparse_embedding"]
        assert (asked.tokens, asked.top_k) == (4, 2)
        [words] = decoded("embed-sparse", request, [{"sparse_embedding": result}])
        assert [(w.index, w.value) for w in words] == [(ID["door"], 2.5), (ID["red"], 0.5)]
        assert [getattr(w, "token", None) for w in words] == (
            ["door", "red"] if named else [None, None]
        )


def test_words_of_texts_without_top_k_are_limited_by_their_number() -> None:
    few = limited(max_results=5)
    request = prepared("embed-sparse", ["a", "b"], few)

    def outputs(*words: int) -> list[Any]:
        results = [SparseEmbeddingResult(np.ones(n, np.float32), np.arange(n)) for n in words]
        return [{"sparse_embedding": result} for result in results]

    first, second = decoded("embed-sparse", request, outputs(50, 30), few)
    assert (len(first), len(second)) == (50, 30)
    with refused("limit_exceeded", 81, 80):
        decoded("embed-sparse", request, outputs(50, 31), few)


def compared(*sentences: str) -> SimilarityInputs:
    return SimilarityInputs(source_sentence="the door", sentences=list(sentences))


def test_sentences_are_compared_by_their_cosine() -> None:
    request = prepared("similarity", compared("a", "b"), return_usage=True)
    assert tokens(request) == ["[CLS] the door [SEP]", "[CLS] a [SEP]", "[CLS] b [SEP]"]
    assert request.usage == [TextUsage(4, 4), TextUsage(3, 3), TextUsage(3, 3)]
    cosines = decoded("similarity", request, vectors([2, 0, 0, 0], [3, 4, 0, 0], [-5, 0, 0, 0]))
    assert cosines == pytest.approx([0.6, -1])


def test_details_pair_the_tokens_that_are_most_alike() -> None:
    request = prepared("similarity", compared("red sun"), details=True)
    assert sorted(request.encodings[0].requests) == ["embedding", "token_embedding"]
    # [CLS] and [SEP] of the sentence are like "the", but are no words.
    source = np.array([[1, 1], [1, 0], [3, 4], [1, 1]], np.float32)
    sentence = np.array([[1, 0], [0, 2], [2, 0.5], [1, 0]], np.float32)
    outputs = vectors([1, 0, 0, 0], [1, 0, 0, 0])
    for output, rows in zip(outputs, (source, sentence), strict=True):
        output["token_embedding"] = ArrayResult(rows)
    [result] = decoded("similarity", request, outputs)
    length = math.hypot(2, 0.5)
    assert result.score == pytest.approx(1)
    assert result.pairs == [
        TokenPair((0, 3), (4, 7), pytest.approx(2 / length)),
        TokenPair((4, 8), (0, 3), pytest.approx(0.8)),
    ]


def test_details_are_the_ten_best_pairs_at_most() -> None:
    # The recipe reads 8 tokens of a text, so that a longer limit is needed for more pairs.
    model = context(
        limited(max_tokens=16).limits, limits={"max_tokens": 16}, embedding=recipe(max_tokens=16)
    )
    text = SimilarityInputs(source_sentence="a b c d e f g h i j k l", sentences=["a"])
    request = prepared("similarity", text, model, details=True)
    outputs = vectors([1, 0, 0, 0], [1, 0, 0, 0])
    for output, count in zip(outputs, (14, 3), strict=True):
        output["token_embedding"] = ArrayResult(np.ones((count, 2), np.float32))
    [result] = decoded("similarity", request, outputs, model)
    assert len(result.pairs) == 10
