"""The measures of labels, numbers and entities, beside scikit-learn, scipy and seqeval."""

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as oracle

from cloze.export.measure.metrics import (
    accuracy,
    entities,
    entity_scores,
    macro_f1,
    matthews,
    micro_f1,
    pearson,
    spearman,
)

SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
def test_labels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, 4, 60)
    predicted = np.where(rng.random(60) < 0.6, gold, rng.integers(0, 4, 60))
    one_hot = np.eye(5, dtype=bool)  # the last label never occurs
    assert accuracy(predicted, gold) == oracle.accuracy_score(gold, predicted)
    assert matthews(predicted, gold) == pytest.approx(oracle.matthews_corrcoef(gold, predicted))
    expected = oracle.f1_score(gold, predicted, average="macro")
    assert macro_f1(one_hot[predicted], one_hot[gold]) == pytest.approx(expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_several_labels_per_text(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gold = rng.random((40, 3)) < 0.3
    predicted = np.where(rng.random((40, 3)) < 0.7, gold, ~gold)
    assert accuracy(predicted, gold) == oracle.accuracy_score(gold, predicted)
    for measure, average in ((macro_f1, "macro"), (micro_f1, "micro")):
        expected = oracle.f1_score(gold, predicted, average=average)
        assert measure(predicted, gold) == pytest.approx(expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, 6, 50).astype(float)  # with ties
    predicted = gold + rng.normal(size=50)
    assert pearson(predicted, gold) == pytest.approx(stats.pearsonr(predicted, gold).statistic)
    assert spearman(predicted, gold) == pytest.approx(stats.spearmanr(predicted, gold).statistic)


def test_a_side_without_variation_has_no_correlation() -> None:
    same = np.ones(3, np.int64)
    assert pearson(same, [1, 2, 3]) == spearman([1, 2, 3], same) == matthews(same, same) == 0


# Sentences of random tags, and precision, recall and F1 of seqeval 1.2.2.
SEQEVAL = [
    (
        ["B-A O B-A B-BC", "B-A B-A I-A B-A", "O B-BC O B-A O", "B-BC"],
        ["B-BC B-BC B-A B-BC", "B-A B-A I-A B-A", "O B-BC B-BC B-A B-A", "B-BC"],
        [0.666666666667, 0.888888888889, 0.761904761905],
    ),
    (
        ["B-BC O", "O B-A I-A", "B-BC B-A O O", "O B-A I-A B-BC"],
        ["O O", "O B-BC B-A", "B-BC B-A O I-A", "O I-BC I-A B-BC"],
        [0.375, 0.5, 0.428571428571],
    ),
    (
        ["O", "B-A", "B-BC I-BC", "B-A B-BC O"],
        ["O", "B-A", "B-BC I-BC", "B-A B-BC B-BC"],
        [0.8, 1.0, 0.888888888889],
    ),
    (
        ["B-BC B-BC", "B-A B-BC", "B-BC B-BC O B-BC", "B-A"],
        ["B-BC B-BC", "I-A B-BC", "B-BC B-BC O B-BC", "B-BC"],
        [0.875, 0.875, 0.875],
    ),
]


@pytest.mark.parametrize(("gold", "predicted", "expected"), SEQEVAL)
def test_entities(gold: list[str], predicted: list[str], expected: list[float]) -> None:
    marked, found = (
        entities([tags.split() for tags in sentences]) for sentences in (gold, predicted)
    )
    assert list(entity_scores(found, marked).values()) == pytest.approx(expected)


def test_types_that_the_data_does_not_mark_are_not_counted() -> None:
    gold = entities([["B-A", "O"]])
    assert entity_scores(entities([["B-A", "B-NEW"]]), gold)["entity_precision"] == 1
