"""Time that other work on the machine takes from a test: the kernel's account of missing cores."""

import time
from pathlib import Path


class Stopwatch:
    """Measures how long the event loop of a server takes, also beside other processes.

    Time in which the thread of the loop, or this thread, is ready to run and has no core does not
    count. Time in which the loop runs, or waits for anything else, counts.
    """

    def __init__(self, pid: int) -> None:
        self._threads = (Path("/proc/thread-self"), Path(f"/proc/{pid}/task/{pid}"))
        self._without_core_s = self._read_s()
        self._started = time.monotonic()

    def elapsed_s(self) -> float:
        """Return the seconds since the start, without those in which a core was missing."""
        elapsed_s = time.monotonic() - self._started
        return max(0.0, elapsed_s - (self._read_s() - self._without_core_s))

    def _read_s(self) -> float:
        fields = [(thread / "schedstat").read_text().split() for thread in self._threads]
        return sum(int(waited) for _, waited, _ in fields) / 1e9
