"""Temperature scaling, against a direct minimisation by scipy and torch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar

from cloze.export.measure.metrics import calibrate, calibration_error


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
