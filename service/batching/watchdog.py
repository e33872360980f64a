"""Notices a run of the engine that hangs: one that takes far longer than predicted."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_FACTOR = 10.0
"""How many times its predicted time a run may take, besides the margin."""

_UNMEASURED_S = 60.0
"""How long a run may take, besides the margin, before any run was measured."""

_CHECKS_PER_MARGIN = 4


@dataclass(slots=True)
class _Run:
    """A run. It hangs after `limit_s` seconds, of which `left_s` are left."""

    limit_s: float
    left_s: float


class Watchdog:
    """The runs of one engine, and how long each of them may take.

    Args:
        margin_s: seconds that a run may take beyond ten times its predicted time.
        on_hang: called once with the reason, on the thread of `watch`.
    """

    def __init__(self, margin_s: float, on_hang: Callable[[str], None]) -> None:
        self._margin_s = margin_s
        self._on_hang = on_hang
        self._lock = threading.Lock()
        self._runs: dict[int, _Run] = {}
        self._ended = threading.Event()

    @property
    def busy(self) -> set[int]:
        """The workers that run a batch."""
        with self._lock:
            return set(self._runs)

    def began(self, worker: int, predicted_s: float | None) -> None:
        """Note the start of a worker's run; None: no run was measured yet."""
        expected_s = _UNMEASURED_S if predicted_s is None else _FACTOR * predicted_s
        limit_s = expected_s + self._margin_s
        with self._lock:
            self._runs[worker] = _Run(limit_s, limit_s)

    def finished(self, worker: int) -> None:
        """Note the end of a worker's run."""
        with self._lock:
            self._runs.pop(worker, None)

    def end(self) -> None:
        """End `watch`."""
        self._ended.set()

    def watch(self) -> None:
        """Watch the runs until one hangs, or until `end` is called.

        The time in which this thread did not run is not counted: the process was stopped then, or
        the machine.
        """
        period_s = self._margin_s / _CHECKS_PER_MARGIN
        before = time.monotonic()
        while not self._ended.wait(period_s):
            now = time.monotonic()
            passed_s, before = min(now - before, 2 * period_s), now
            with self._lock:
                runs = list(self._runs.values())
                hung = next((run for run in runs if run.left_s <= 0), None)
                for run in runs:
                    run.left_s -= passed_s
            if hung is not None:
                self._on_hang(f"a run took longer than {hung.limit_s:.1f} s")
                return
