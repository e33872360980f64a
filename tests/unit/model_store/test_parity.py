"""How far outputs are apart: the measure that publishes and starts a graph."""

import math

import numpy as np
import pytest

from cloze.model_store.parity import output_errors


def error(
    actual: object, expected: object, *, tolerance: float = 0.1, name: str = "embeddings"
) -> float:
    outputs = {name: np.asarray(actual, np.float32)}
    return output_errors(outputs, {name: np.asarray(expected, np.float32)}, tolerance)[name]


def ids_error(actual: list[int], expected: list[int], logits: list[float]) -> float:
    """Return the error of ids whose logits torch computed."""
    both = {"top_ids": np.array([expected]), "top_logits": np.array([logits], np.float32)}
    ours = {"top_ids": np.array([actual]), "top_logits": both["top_logits"]}
    errors = output_errors(ours, both, 0.1)
    assert errors["top_logits"] == 0
    return errors["top_ids"]


def test_an_error_is_absolute_below_one_and_relative_above() -> None:
    assert error([0.5, 0.25], [0.25, 0.25]) == pytest.approx(0.25)
    assert error([0.25, 0.25], [0.5, 0.25]) == pytest.approx(0.25)
    assert error([3.0, -8.0], [3.0, -10.0]) == pytest.approx(0.2)
    assert error([-3.0], [3.0]) == pytest.approx(2)
    assert error([0.0, 0.1, 0.5], [0.0, 0.0, 0.0]) == pytest.approx(0.5), "the largest counts"
    assert error([[0.0, 0.0]], [0.0, 0.0]) == math.inf, "another shape"
    for broken in (math.nan, math.inf, -math.inf):
        assert error([broken, 0.0], [0.0, 0.0]) == math.inf
        assert error([0.0, 0.0], [broken, 0.0]) == math.inf
        assert error([broken, 0.0], [broken, 0.0]) == math.inf


@pytest.mark.parametrize(
    ("actual", "logits", "error"),
    [
        ([7, 8, 9], [3.0, 2.0, 1.0], 0),
        ([8, 7, 9], [3.0, 2.0, 1.0], math.inf),
        ([1, 8, 9], [3.0, 2.0, 1.0], math.inf),
        ([7, 1, 9], [3.0, 2.0, 1.0], math.inf),
        # The lower neighbour of the last id is unknown.
        ([7, 8, 1], [3.0, 2.0, 1.0], 0),
        # The logits differ by 0.3; rounding moves each by at most tolerance x scale = 0.1 x 3.
        ([8, 7, 9], [3.0, 2.7, 0.0], 0),
        ([7, 9, 8], [3.0, 1.0, 0.7], 0),
    ],
)
def test_ids_agree_where_their_logits_are_apart(
    actual: list[int], logits: list[float], error: float
) -> None:
    assert ids_error(actual, [7, 8, 9], logits) == error


def test_close_logits_excuse_no_other_id() -> None:
    assert ids_error([1, 9, 8, 5], [7, 8, 9, 5], [3.0, 1.0, 0.7, 0.0]) == math.inf


def test_twice_the_tolerance_separates_two_logits() -> None:
    # With scale 1, logits that differ by more than 2 x 0.1 are settled.
    assert ids_error([1, 9], [7, 9], [0.5, 0.29]) == math.inf
    assert ids_error([1, 9], [7, 9], [0.5, 0.31]) == 0
    # With scale 10, logits that differ by more than 2 x 0.1 x 10 are settled.
    assert ids_error([1, 9], [7, 9], [10.0, 7.9]) == math.inf
    assert ids_error([1, 9], [7, 9], [10.0, 8.1]) == 0
