"""Waiting in tests, with a bound."""

import time
from collections.abc import Callable

_LONGEST_WAIT_S = 60.0


def wait_until(condition: Callable[[], bool], longest_s: float = _LONGEST_WAIT_S) -> None:
    """Return when the condition holds; fail if it does not hold in time."""
    deadline = time.monotonic() + longest_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.001)
