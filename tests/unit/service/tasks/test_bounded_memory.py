"""Preparing a request needs memory in proportion to its bytes, with one token per character too."""

import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest

from cloze.service.tasks.qa import QaPair
from tests.unit.service.tasks.model import limited, prepared

MB = 1_000_000
MOST_MB, MOST_PER_BYTE = 6, 16
"""The limit of ``docs/security.md`` per byte; a piece of a text needs the rest."""

LARGE = limited(
    max_tokens=512, max_results=2 * MB, max_request_tokens=2 * MB, max_text_characters=MB
)
DOTS = "." * 150_000
WINDOWS = {"long_text": "window", "aggregation_strategy": "first"}


@pytest.mark.parametrize(
    ("task", "inputs", "parameters"),
    [
        ("token-classification", [DOTS] * 4, {}),
        ("token-classification", DOTS, WINDOWS),
        ("redact", DOTS, {}),
        ("qa", QaPair(question="a", context=DOTS), {}),
        ("qa", QaPair(question="a", context=DOTS), {"long_text": "truncate"}),
        ("embed", DOTS, {"spans": [(0, 3)]}),
        ("embed-all", [DOTS] * 4, {"return_offsets": True}),
        ("embed-all", DOTS, {"return_offsets": True, "truncation_direction": "left"}),
    ],
)
def test_memory_is_in_proportion_to_the_bytes(
    task: str, inputs: Any, parameters: Mapping[str, Any]
) -> None:
    size = len(DOTS) * (len(inputs) if isinstance(inputs, list) else 1)
    tracemalloc.start()
    try:
        prepared(task, inputs, LARGE, **parameters)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= MOST_MB * MB + MOST_PER_BYTE * size


def test_a_long_text_that_is_cut_reports_all_its_tokens() -> None:
    request = prepared("token-classification", DOTS, LARGE, return_usage=True)
    assert request.usage is not None
    assert [(one.tokens, one.used) for one in request.usage] == [(len(DOTS) + 2, 512)]
    [text] = request.state.texts
    assert len(text.spans.ids) == len(text.spans.offsets) == len(text.spans.words) == 510
