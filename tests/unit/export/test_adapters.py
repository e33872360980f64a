"""The check of a graph with adapters."""

from typing import Any

import numpy as np
import pytest

from cloze.export.adapters import ALL_LAYERS, AdaptedModel
from cloze.export.errors import ExportError
from cloze.model_store.heads import GraphSpec
from cloze.model_store.layouts import Layout
from tests.support.tiny_models import model

SPEC = GraphSpec(Layout.DENSE, (), token_types=True)


class Same:
    """A graph whose states all have one value."""

    def __init__(self, value: float) -> None:
        self._value = value

    def run(self, _: Any, feeds: dict[str, Any]) -> list[Any]:
        rows = len(feeds["adapter_rows"])
        return [np.full((rows, model().config.hidden_size), self._value, np.float32)]


def test_a_graph_that_differs_from_torch_is_refused() -> None:
    """States of zeros differ by as much as the largest state: 1 in units of it."""
    adapted = AdaptedModel.of(model(), [ALL_LAYERS])
    assert adapted.verify(Same(0.0), SPEC, 1.01) == pytest.approx(1)
    for value, tolerance in ((0.0, 0.99), (float("nan"), 1e9)):
        with pytest.raises(ExportError, match=r"differs from torch by .* leave out --adapters"):
            adapted.verify(Same(value), SPEC, tolerance)
