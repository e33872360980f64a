"""Reranking: who scores, in what order texts are returned, and what is refused."""

from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads import ArrayResult
from cloze.service.tasks import rerank
from cloze.service.tasks.task import PreparedRequest, TaskContext
from tests.support.task_model import CONTEXT, LABELS, context, tokens, types


def ranker(*labels: str, **options: Any) -> dict[str, Any]:
    """Return the heads of a classifier with other labels."""
    problem = {"problem_type": "single_label_classification"}
    return {
        "sequence_classification": {"labels": labels} | problem | options,
        "token_classification": {"labels": LABELS},
    }


CLASSIFIER = context(heads=ranker("relevance"))


def asked(
    texts: list[str], model: TaskContext = CLASSIFIER, query: str = "the door", **parameters: Any
) -> PreparedRequest[Any]:
    inputs = rerank.RerankInputs(query=query, texts=texts)
    return rerank.prepare(inputs, rerank.RerankParameters(**parameters), model)


def logits(*values: float) -> list[dict[str, Any]]:
    name = "sequence_classification"
    return [{name: ArrayResult(np.array([v], np.float32))} for v in values]


def test_a_classifier_of_one_label_ranks_pairs_of_query_and_text() -> None:
    request = asked(["a", "b", "c"], return_text=True)
    assert tokens(request) == [f"[CLS] the door [SEP] {text} [SEP]" for text in "abc"]
    assert types(request) == [[0, 0, 0, 0, 1, 1]] * 3
    ranking = rerank.decode(request.state, logits(0, 2, -2), CLASSIFIER)
    assert ranking.by == "classifier"
    assert [(r.index, r.text) for r in ranking.ranks] == [(1, "b"), (0, "a"), (2, "c")]
    sigmoid = [1 / (1 + np.exp(-2)), 0.5, 1 / (1 + np.exp(2))]
    assert [r.score for r in ranking.ranks] == pytest.approx(sigmoid)


def test_scores_are_as_the_checkpoint_declares_unless_the_request_says_so() -> None:
    raw, sigmoid = context(heads=ranker("relevance", raw_scores=True)), CLASSIFIER

    def score(model: TaskContext, asked_for: bool | None) -> tuple[float, str | None]:
        request = asked(["a"], model, raw_scores=asked_for)
        [rank] = rerank.decode(request.state, logits(2), model).ranks
        parameters = rerank.RerankParameters(raw_scores=asked_for)
        return round(rank.score, 4), rerank.TASK.scores(model.manifest, parameters)

    assert score(sigmoid, None) == score(sigmoid, False) == (0.8808, "probability")
    assert score(raw, None) == score(raw, True) == score(sigmoid, True) == (2, "raw score")
    assert score(raw, False) == (0.8808, "probability")


@pytest.mark.parametrize("model", [CONTEXT, context(heads=ranker("no", "yes"))])
def test_any_other_model_ranks_by_the_similarity_of_embeddings(model: TaskContext) -> None:
    request = asked(["a", "b"], model)
    assert tokens(request) == ["[CLS] ask : the door [SEP]", "[CLS] a [SEP]", "[CLS] b [SEP]"]
    rows = ([2, 0, 0, 0], [0, 1, 0, 0], [3, 4, 0, 0])
    outputs = [{"embedding": ArrayResult(np.array(row, np.float32))} for row in rows]
    ranking = rerank.decode(request.state, outputs, model)
    assert ranking.by == "similarity"
    assert [(r.index, r.score) for r in ranking.ranks] == [
        (1, pytest.approx(0.6)),
        (0, pytest.approx(0)),
    ]


def test_saturated_scores_keep_the_order_of_their_logits() -> None:
    outputs = logits(30, 90, -900, 45, 45)
    texts = list("abcd")
    ranking = rerank.decode(asked(texts).state, outputs[:4], CLASSIFIER)
    assert [r.index for r in ranking.ranks] == [1, 3, 0, 2]
    assert [r.score for r in ranking.ranks] == pytest.approx([1, 1, 1, 0])
    equal = rerank.decode(asked(texts).state, outputs[1:], CLASSIFIER)
    assert [r.index for r in equal.ranks] == [0, 2, 3, 1]


def test_a_long_text_is_sequences_of_its_own_beside_the_query() -> None:
    """The queue takes these by turns, so that a text has no more of a batch than others have."""
    request = asked(["a b c d e f g h i j", "k"], long_text="window", return_usage=True)
    assert tokens(request) == [
        "[CLS] the door [SEP] a b c d e f g [SEP]",
        "[CLS] the door [SEP] g h i j [SEP]",
        "[CLS] the door [SEP] k [SEP]",
    ]
    assert request.usage is not None
    assert [text.windows for text in request.usage] == [[(0, 13), (12, 19)], None]
    ranks = rerank.decode(request.state, logits(1, 3, 2), CLASSIFIER).ranks
    assert [(r.index, r.window) for r in ranks] == [(0, (12, 19)), (1, None)]
