"""How outputs of a graph are compared with torch's: the one measure that export publishes by and a server starts by."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model_store.heads import masked_lm


def errors(
    actual: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]], tolerance: float
) -> dict[str, float]:
    """The largest error of each output.

    Of floats: ``max |actual - expected| / max(1, max |expected|)``. Of ``top_ids``: 0 or infinity, whether they agree
    wherever torch's logits are further apart than the tolerance, so that neither order is as good as the other.

    Args:
        actual: the graph's outputs; those beyond ``expected`` are not looked at.
        expected: torch's.
        tolerance: what is let through.

    Returns:
        by output's name; infinity where the shape is another or a number is not finite.
    """
    found = {}
    for name, wanted in expected.items():
        given = actual[name]
        if given.shape != wanted.shape or not (
            np.isfinite(given).all() and np.isfinite(wanted).all()
        ):
            found[name] = float("inf")
        elif name == masked_lm.TOP_IDS.name:
            agree = (given == wanted) | ~_is_settled(expected[masked_lm.TOP_LOGITS.name], tolerance)
            found[name] = 0.0 if agree.all() else float("inf")
        else:
            scale = max(1.0, float(np.abs(wanted).max(initial=0.0)))
            found[name] = float(np.abs(given - wanted).max(initial=0.0)) / scale
    return found


def _is_settled(top_logits: NDArray[Any], tolerance: float) -> NDArray[np.bool_]:
    """Which of ``top_logits [M, K]`` differ from their neighbours by more than rounding; of the last one none can tell."""
    apart = -np.diff(top_logits, axis=1) > 2 * tolerance * max(
        1.0, float(np.abs(top_logits).max(initial=0.0))
    )  # [M, K - 1]
    settled = np.zeros(top_logits.shape, np.bool_)
    settled[:, :-1] = apart
    settled[:, 1:-1] &= apart[:, :-1]
    return settled
