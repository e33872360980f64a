"""Virtual time for the scheduler, so that tests of its order of work take no time."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from cloze.service.batching import admission, fair_queue, scheduler


class Clock:
    """Virtual time, in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the virtual time."""
        return self.now


@contextmanager
def virtual_time(clock: Clock) -> Iterator[None]:
    """Give the classes of the scheduler a virtual time until the context ends."""
    with ExitStack() as stack:
        for module in (admission, fair_queue, scheduler):
            stack.enter_context(patch.object(module, "time", clock))
        yield
