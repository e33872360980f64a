"""Figures of predictions, beside scikit-learn, scipy and seqeval."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from scipy.optimize import minimize_scalar
from sklearn import metrics as oracle

from cloze.export.measure.metrics import (
    calibrate,
    calibration_error,
    classification,
    entity_tags,
    multi_label,
    regression,
)

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
    same = np.ones(3)  # a side without variation has no correlation
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


def rows(labels: int, scale: float, *, independent: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return logits that are `scale` times too large, and labels drawn from the right ones."""
    rng = np.random.default_rng(labels)
    logits = rng.normal(0, 2, (3000, labels))
    if independent:
        gold = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
    else:
        drawn = (logits + rng.gumbel(size=logits.shape)).argmax(1)
        gold = np.eye(labels, dtype=bool)[drawn]
    return (scale * logits).astype(np.float32), gold


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize(("labels", "scale"), [(2, 3.0), (5, 0.5), (7, 1.0)])
def test_the_temperature_is_that_of_a_direct_minimisation(
    labels: int, scale: float, independent: bool
) -> None:
    logits, gold = rows(labels, scale, independent=independent)
    scores, right = torch.tensor(logits).double(), torch.tensor(gold)

    def loss(temperature: float) -> float:
        if independent:
            return float(F.binary_cross_entropy_with_logits(scores / temperature, right.double()))
        return float(F.cross_entropy(scores / temperature, right.double()))

    options = {"xatol": 1e-8}
    oracle = minimize_scalar(loss, bounds=(0.1, 10), method="bounded", options=options).x
    measured = calibrate(logits, gold, independent=independent)
    assert measured.temperature == pytest.approx(oracle, rel=1e-5)
    assert measured.temperature == pytest.approx(scale, rel=0.1)
    if scale != 1.0:
        assert measured.error_after < 0.5 * measured.error_before
    assert f"temperature {oracle:.3f}, expected calibration error" in str(measured)


def test_without_an_error_the_temperature_has_a_bound() -> None:
    logits, gold = np.array([[2.0, 1.0], [0.0, 3.0]], np.float32), np.eye(2, dtype=bool)
    assert calibrate(logits, gold, independent=False).temperature == pytest.approx(0.1)
    assert calibrate(logits, ~gold, independent=False).temperature == pytest.approx(10.0)
    # No exponential of a large logit overflows.
    assert calibrate(1000 * logits, ~gold, independent=False).temperature == pytest.approx(10.0)


def test_the_error_is_the_gap_between_confidence_and_accuracy() -> None:
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.39, 0.61], [1.0, 0.0]])
    gold = np.array([[1, 0], [0, 1], [0, 1], [1, 0]], bool)
    # bins: two of confidence 0.9, of which half is right; one of 0.61, right; one of 1.0, right
    assert calibration_error(probabilities, gold) == pytest.approx((2 * 0.4 + 0.39 + 0.0) / 4)
    # A confidence of 1 is in the last bin, with those above 14/15.
    sure, same = np.array([[1.0, 0.0], [0.95, 0.05]]), np.array([[0, 1], [1, 0]], bool)
    assert calibration_error(sure, same) == pytest.approx((1.0 + 0.95 - 1) / 2)
    assert calibration_error(np.array([[0.8, 0.3]]), np.array([[True, True]]), True) == (
        pytest.approx((0.2 + 0.7) / 2)
    )
    # Of independent labels, more than one half is a yes.
    assert calibration_error(np.array([[0.55]]), np.array([[True]]), True) == pytest.approx(0.45)
