"""Temperature scaling: one number by which the logits of a label set are divided.

The labels that are chosen stay the same, and the probabilities come closer to the share of choices
that are right. Shapes: N rows, L labels.

Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", sections 2 and 4.2.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_expit, log_softmax, softmax
from scipy.stats import binned_statistic

_BINS = 15
"""Number of bins of confidence, as in the paper."""

_MOST = 10.0
"""Bound of a temperature and of its inverse: without an error in the rows, the best one is 0."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A temperature, and the expected calibration error in [0, 1] without and with it."""

    temperature: float
    error_before: float
    error_after: float

    def __str__(self) -> str:
        return (
            f"temperature {self.temperature:.3f}, expected calibration error "
            f"{self.error_before:.4f} before and {self.error_after:.4f} after"
        )


def calibrate(
    logits: NDArray[np.floating], gold: NDArray[np.bool_], *, independent: bool
) -> Calibration:
    """Return the temperature with the least negative log-likelihood, from 0.1 to 10.

    Args:
        logits: float [N, L], at least one row.
        gold: bool [N, L], whether each row has each label.
        independent: whether a row may have any number of labels.
    """
    scores = logits.astype(np.float64)

    def loss(log_temperature: float) -> float:
        scaled = scores / np.exp(log_temperature)
        if independent:
            return -float(log_expit(np.where(gold, scaled, -scaled)).mean())
        return -float(log_softmax(scaled, axis=1)[gold].mean())

    bounds, options = (-np.log(_MOST), np.log(_MOST)), {"xatol": 1e-7}
    found = minimize_scalar(loss, bounds=bounds, method="bounded", options=options)
    temperature = float(np.exp(found.x))
    before, after = (
        calibration_error(
            expit(scaled) if independent else softmax(scaled, axis=1), gold, independent
        )
        for scaled in (scores, scores / temperature)
    )
    return Calibration(temperature, before, after)


def calibration_error(
    probabilities: NDArray[np.floating], gold: NDArray[np.bool_], independent: bool = False
) -> float:
    """Return the expected calibration error: confidence against accuracy in 15 equal bins.

    A choice is the label with the highest probability, or of independent labels each yes or no.
    """
    if independent:
        confidence = np.maximum(probabilities, 1 - probabilities).ravel()
        right = ((probabilities > 0.5) == gold).ravel()
    else:
        confidence = probabilities.max(1)
        right = gold[np.arange(len(gold)), probabilities.argmax(1)]
    gaps, _, _ = binned_statistic(confidence, confidence - right, "sum", _BINS, range=(0, 1))
    return float(np.abs(gaps).sum() / len(confidence))
