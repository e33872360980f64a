"""Temperature scaling: one number by which the logits of a label set are divided.

The labels that are chosen stay the same, and the probabilities come closer to the share of choices
that are right. Shapes: N rows, L labels.

Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", sections 2 and 4.2.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cloze.export.measure.scorer import Floats

_BINS = 15
"""Number of bins of confidence, as in the paper."""

_LEAST, _MOST = 0.1, 10.0
"""Bounds of a temperature: without an error in the rows, the best one would be 0."""

_HALVINGS = 50


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


def calibrate(logits: Floats, gold: NDArray[np.bool_], *, independent: bool) -> Calibration:
    """Return the temperature with the least negative log-likelihood, from 0.1 to 10.

    Args:
        logits: float [N, L], at least one row.
        gold: bool [N, L], whether each row has each label.
        independent: whether a row may have any number of labels.
    """
    scores: Floats = logits.astype(np.float64)
    low, high = np.log(1 / _MOST), np.log(1 / _LEAST)
    for _ in range(_HALVINGS):  # the likelihood is concave in the inverse of the temperature
        middle = (low + high) / 2
        # The slope of the negative log-likelihood: expected logits less those of the labels.
        probabilities = _probabilities(scores * np.exp(middle), independent=independent)
        slope = ((probabilities - gold) * scores).sum()
        low, high = (low, middle) if slope > 0 else (middle, high)
    temperature = float(np.exp(-(low + high) / 2))
    before, after = (
        calibration_error(_probabilities(scores / t, independent=independent), gold, independent)
        for t in (1.0, temperature)
    )
    return Calibration(temperature, before, after)


def _probabilities(logits: Floats, *, independent: bool) -> Floats:
    if independent:
        return np.exp(-np.logaddexp(0, -logits))
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    softmax: Floats = shifted / shifted.sum(1, keepdims=True)
    return softmax


def calibration_error(
    probabilities: Floats, gold: NDArray[np.bool_], independent: bool = False
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
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, confidence - right, minlength=_BINS)
    return float(np.abs(gaps).sum() / len(confidence))
