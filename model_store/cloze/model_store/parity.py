"""Measures how far a graph's outputs are from torch's.

Export publishes a graph, and a server starts with a graph, by this one measure.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloze.model_store.heads import HEADS

_RANKED = {ids: numbers for head in HEADS.values() for ids, numbers in head.ranked.items()}
"""See `Head.ranked`."""

Arrays = Mapping[str, NDArray[Any]]
"""Outputs by tensor name."""


def output_errors(actual: Arrays, expected: Arrays, tolerance: float) -> dict[str, float]:
    """Return the largest error of each output.

    The error of floats is ``max |actual - expected| / max(1, max |expected|)``. The error of
    ids is 0 if the ids agree, else infinity. Ids are compared only where torch's numbers differ by
    more than the tolerance: rounding may swap two closer numbers.

    Returns:
        Errors by output name; infinity if the shapes differ or a number is not finite.
    """
    return {name: _error(name, actual[name], expected, tolerance) for name in expected}


def _error(name: str, actual: NDArray[Any], expected: Arrays, tolerance: float) -> float:
    reference = expected[name]
    if actual.shape != reference.shape:
        return float("inf")
    if not (np.isfinite(actual).all() and np.isfinite(reference).all()):
        return float("inf")
    if name in _RANKED:
        settled = _is_settled(expected[_RANKED[name]], tolerance)
        return 0.0 if ((actual == reference) | ~settled).all() else float("inf")
    scale = max(1.0, float(np.abs(reference).max(initial=0.0)))
    return float(np.abs(actual - reference).max(initial=0.0)) / scale


def _is_settled(numbers: NDArray[Any], tolerance: float) -> NDArray[np.bool_]:
    """Return which of ``numbers [M, K]`` differ from their neighbours by more than rounding.

    The last number of a row never counts as settled, because its lower neighbour is unknown.
    """
    scale = max(1.0, float(np.abs(numbers).max(initial=0.0)))
    apart = -np.diff(numbers, axis=1) > 2 * tolerance * scale  # [M, K - 1]
    settled = np.zeros(numbers.shape, np.bool_)
    settled[:, :-1] = apart
    settled[:, 1:-1] &= apart[:, :-1]
    return settled
