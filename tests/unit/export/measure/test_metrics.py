"""Figures of predictions, beside scikit-learn, scipy and seqeval."""

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as oracle

from cloze.export.measure.metrics import classification, entity_tags, multi_label, regression

SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_label_per_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, 4, 60)
    predicted = np.where(rng.random(60) < 0.6, gold, rng.integers(0, 4, 60))
    assert classification(np.eye(5)[predicted], gold) == {  # the last label never occurs
        "accuracy": (predicted == gold).mean(),
        "macro_f1": pytest.approx(oracle.f1_score(gold, predicted, average="macro")),
        "matthews": pytest.approx(oracle.matthews_corrcoef(gold, predicted)),
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_several_labels_per_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gold = rng.random((40, 3)) < 0.3
    predicted = np.where(rng.random((40, 3)) < 0.7, gold, ~gold)
    nobody = np.zeros((40, 1), bool)  # a label that no row has does not lower macro F1
    logits = np.where(np.hstack([predicted, nobody]), 0.1, -0.1)
    assert multi_label(logits, np.hstack([gold, nobody])) == {
        "accuracy": oracle.accuracy_score(gold, predicted),
        "macro_f1": pytest.approx(oracle.f1_score(gold, predicted, average="macro")),
        "micro_f1": pytest.approx(oracle.f1_score(gold, predicted, average="micro")),
    }
    assert set(multi_label(-np.ones((2, 1)), np.zeros((2, 1), bool)).values()) == {0.0, 1.0}


def test_numbers() -> None:
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 6, 50).astype(float)  # with ties
    predicted = gold + rng.normal(size=50)
    assert regression(predicted, gold) == {
        "pearson": pytest.approx(np.corrcoef(predicted, gold)[0, 1]),
        "spearman": pytest.approx(
            np.corrcoef(stats.rankdata(predicted), stats.rankdata(gold))[0, 1]
        ),
    }


def test_a_side_without_variation_has_no_correlation() -> None:
    same = np.ones(3)
    assert set(regression(same, [1, 2, 3]).values()) == {0}
    assert set(regression([1, 2, 3], same).values()) == {0}
    assert classification(np.eye(2)[[1, 1]], np.array([1, 1]))["matthews"] == 0


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
    (  # the sentences have no ORG: the predicted ones count all the same
        ["B-PER I-PER O B-LOC O", "O O B-PER"],
        ["B-PER I-PER O B-LOC B-ORG", "B-ORG I-ORG B-PER"],
        [0.6, 1.0, 0.75],
    ),
]


@pytest.mark.parametrize(("gold", "predicted", "expected"), SEQEVAL)
def test_entities(gold: list[str], predicted: list[str], expected: list[float]) -> None:
    guesses, marked = ([tags.split() for tags in rows] for rows in (predicted, gold))
    assert list(entity_tags(guesses, marked).values())[:3] == pytest.approx(expected)
    right = [
        a == b
        for one, other in zip(guesses, marked, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    assert entity_tags(guesses, marked)["accuracy"] == np.mean(right)
