"""Waiting in tests, with a bound, and the mark of tests that measure time."""

import time
from collections.abc import Callable

import pytest

MEASURES_TIME = pytest.mark.flaky(reruns=2)
"""Runs a failed test again, twice at most; the report lists each repetition.

For tests whose limits are in seconds of a clock. They fail without a defect when other guests of the
host take the processor for a second.
"""

_LONGEST_WAIT_S = 20.0


def wait_until(condition: Callable[[], bool], longest_s: float = _LONGEST_WAIT_S) -> None:
    """Return when the condition holds; fail if it does not hold in time."""
    deadline = time.monotonic() + longest_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.001)
