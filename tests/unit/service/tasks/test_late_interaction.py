"""Late interaction: markers, filling, skipped tokens, roles, and MaxSim by hand."""

from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads import ArrayResult, HeadRequest
from cloze.model_store.heads.multi_vector import LateInteraction
from cloze.service.tasks import late_interaction, rerank
from cloze.service.tasks.task import PreparedRequest, TaskContext
from tests.support.task_model import ID, MASK, context, decoded, prepared, tokens

OPTIONS: dict[str, Any] = {
    "dimensions": 2,
    "query_marker": ID["?"],
    "document_marker": ID["!"],
    "query_tokens": 7,
    "document_tokens": 8,
    "filling": MASK,
    "skipped_ids": [ID["."], ID[","]],
}


def model(**changes: Any) -> TaskContext:
    return context(
        tasks=["multi-vector"], embedding=None, heads={"multi_vector": OPTIONS | changes}
    )


MODEL = model()


def vectors(*counts: int) -> list[Any]:
    rows = np.arange(60, dtype=np.float32).reshape(-1, 2)
    return [{"multi_vector": ArrayResult(rows[:count])} for count in counts]


def keys(request: PreparedRequest[Any]) -> list[int]:
    return [one.requests["multi_vector"].keys for one in request.encodings]


def test_queries_have_a_marker_and_are_filled() -> None:
    texts = ["the door", "the", "the first of the year is old"]
    request = prepared("embed-all", texts, MODEL, prompt_name="query")
    assert tokens(request) == [
        "[CLS] ? the door [SEP] [MASK] [MASK]",
        "[CLS] ? the [SEP] [MASK] [MASK] [MASK]",
        "[CLS] ? the first of the [SEP]",
    ]
    assert keys(request) == [5, 4, 0]
    assert request.truncated == 1
    assert [len(rows) for rows in decoded("embed-all", request, vectors(7, 7, 7), MODEL)] == [7] * 3
    attending = prepared("embed-all", texts, model(attends_to_filling=True), prompt_name="query")
    assert keys(attending) == [0, 0, 0]
    assert tokens(attending) == tokens(request)
    plain = model(filling=None, query_marker=None)
    assert tokens(prepared("embed-all", texts[:1], plain, prompt_name="query")) == [
        "[CLS] the door [SEP]"
    ]


def test_documents_have_a_marker_and_no_vectors_of_skipped_tokens() -> None:
    request = prepared("embed-all", ["the , door .", "the . , old . year . door"], MODEL)
    assert tokens(request) == ["[CLS] ! the , door . [SEP]", "[CLS] ! the . , old . [SEP]"]
    assert keys(request) == [0, 0]
    first, second = decoded("embed-all", request, vectors(7, 8), MODEL)
    assert (first[:, 0] / 2).tolist() == [0, 1, 2, 4, 6]
    assert (second[:, 0] / 2).tolist() == [0, 1, 2, 5, 7]
    skipping = model(skips_first=True)
    request = prepared("embed-all", "the .", skipping)
    assert (decoded("embed-all", request, vectors(5), skipping)[0][:, 0] / 2).tolist() == [1, 2, 4]
    request = prepared("embed-all", "the .", skipping, prompt_name="query")
    assert len(decoded("embed-all", request, vectors(7), skipping)[0]) == 6


def test_no_role_has_more_tokens_than_the_model_reads() -> None:
    request = prepared("embed-all", "a b c d e f g h i j k", model(document_tokens=20))
    assert tokens(request) == ["[CLS] ! a b c d e f g h i [SEP]"]
    assert request.truncated == 1


def test_places_are_those_of_the_vectors() -> None:
    request = prepared("embed-all", ["the , door ."], MODEL, return_offsets=True)
    [result] = decoded("embed-all", request, vectors(7), MODEL)
    assert result.offsets == [None, None, (0, 3), (6, 10), None]
    assert len(result.embeddings) == 5
    cut = prepared(
        "embed-all", ["a b c d e f g"], MODEL, return_offsets=True, truncation_direction="left"
    )
    assert tokens(cut) == ["[CLS] ! c d e f g [SEP]"]
    assert cut.state.offsets == [[None, None, *((n, n + 1) for n in range(4, 14, 2)), None]]


def test_rerank_takes_the_best_product_of_each_query_vector() -> None:
    inputs = rerank.RerankInputs(query="the", texts=["door .", "year"])
    request = rerank.prepare(inputs, rerank.RerankParameters(), MODEL)
    assert tokens(request) == [
        "[CLS] ? the [SEP] [MASK] [MASK] [MASK]",
        "[CLS] ! door . [SEP]",
        "[CLS] ! year [SEP]",
    ]
    assert request.answer_rows == 7 + 5 + 4
    query = np.tile(np.array([[1, 0], [0, 1]], np.float32), (4, 1))[:7]
    documents = np.array([[0.1, 0.2], [0.5, 0], [0, 0.3], [9, 9], [0, 0]], np.float32)
    rows = [query, documents, documents[[0, 1, 2, 4]] * 2]
    outputs = [{"multi_vector": ArrayResult(array)} for array in rows]
    ranking = rerank.decode(request.state, outputs, MODEL)
    assert ranking.by == "late-interaction"
    assert [rank.index for rank in ranking.ranks] == [1, 0]  # the row of `.` does not count
    assert [rank.score for rank in ranking.ranks] == pytest.approx([2 * 2.9, 2.9])


def test_scores_are_averaged_if_the_model_says_so() -> None:
    query = np.array([[1, 0], [0, 1]], np.float32)
    documents = [query, -query, query[:0]]
    options = LateInteraction(dimensions=2, query_tokens=8, document_tokens=8)
    assert late_interaction.scores(query, documents, options) == [2, 0, 0]
    averaged = options.model_copy(update={"averages": True})
    assert late_interaction.scores(query, documents, averaged) == [1, 0, 0]


def test_lexical_weights_are_the_largest_of_each_token() -> None:
    lexical = context(
        tasks=["lexical"],
        embedding=None,
        heads={"lexical": {"skipped_ids": [ID["[CLS]"], ID["[SEP]"]]}},
    )
    request = prepared("embed-sparse", "the door the the year old", lexical)
    assert [one.requests for one in request.encodings] == [{"lexical": HeadRequest()}]
    weights = np.array([9, 1, 0.5, 3, 1.5, 0, 2, 9], np.float32)[:, None]
    outputs = [{"lexical": ArrayResult(weights)}]
    [words] = decoded("embed-sparse", request, outputs, lexical)
    assert [(word.index, word.value) for word in words] == [
        (ID["the"], 3.0),
        (ID["old"], 2.0),
        (ID["door"], 0.5),
    ]
    request = prepared(
        "embed-sparse", "the door the the year old", lexical, top_k=1, return_tokens=True
    )
    [[word]] = decoded("embed-sparse", request, outputs, lexical)
    assert (word.token, word.value) == ("the", 3.0)
