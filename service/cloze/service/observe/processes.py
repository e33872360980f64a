"""The metrics of several processes of one server, which write them to a shared folder."""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client import Counter, Gauge, multiprocess, values
from prometheus_client.mmap_dict import MmapedDict

from cloze.service.clock import CLOCK, Clock

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Variable of the folder of metrics, which prometheus_client reads when it is imported."""

_LEAST_BYTES = 65_536
"""Size of a new file of prometheus_client, which doubles the size when a value has no room."""


class ReservedValues(MmapedDict):
    """The values of metrics in a mapped file, whose space on the disk is reserved before its use.

    prometheus_client reserves nothing, and the kernel ends a process that writes to a mapped page
    for which the disk has no space (SIGBUS). Here, values without space wait. At the next change of
    any value, at most once a second, all of them are written if there is space.
    """

    def __init__(self, filename: str, clock: Clock = CLOCK) -> None:
        self._path, self._clock = Path(filename), clock
        self._f = None  # type: ignore[assignment]  # until the file has its first bytes
        self._positions: dict[str, int] = {}
        self._waiting: dict[str, tuple[float, float]] = {}
        self._retry = -math.inf  # time until which the disk counts as full
        self._write_waiting()

    def read_value(self, key: str) -> tuple[float, float]:
        """Return a value and its time."""
        if key not in self._positions:
            self._waiting.setdefault(key, (0.0, 0.0))
            self._write_waiting()
        if key in self._waiting:
            return self._waiting[key]
        return super().read_value(key)  # type: ignore[no-untyped-call, no-any-return]

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        """Write a value, or keep it until there is space for it."""
        if key in self._positions:
            super().write_value(key, value, timestamp)  # type: ignore[no-untyped-call]
        else:
            self._waiting[key] = value, timestamp
        if self._waiting:
            self._write_waiting()

    def _write_waiting(self) -> None:
        """Open the file and write what waits, as far as there is space."""
        if self._clock.monotonic() < self._retry:
            return
        try:
            if self._f is None:
                self._open()
            for key in list(self._waiting):
                size = self._capacity
                while key not in self._positions and self._used + len(key.encode()) + 32 > size:
                    size *= 2
                self._reserve(self._path, size)
                super().write_value(key, *self._waiting.pop(key))  # type: ignore[no-untyped-call]
        except OSError:
            self._retry = self._clock.monotonic() + 1.0

    def _open(self) -> None:
        """Map the file; a new one gets its name, by which scrapes find it, with its first bytes."""
        if not self._path.exists():
            part = self._path.with_suffix(".part")
            try:
                self._reserve(part, _LEAST_BYTES)
                part.rename(self._path)
            finally:
                part.unlink(missing_ok=True)
        try:
            super().__init__(str(self._path))  # type: ignore[no-untyped-call]
        except OSError:
            self._f = None  # type: ignore[assignment]
            raise
        for key in self._positions.keys() & self._waiting.keys():
            if self._waiting[key] == (0.0, 0.0):  # only read; a predecessor's value goes on
                del self._waiting[key]

    @staticmethod
    def _reserve(path: Path, size: int) -> None:
        """Write zeros behind the content of a file up to a size in bytes.

        Raises:
            OSError: the disk is full.
        """
        with path.open("ab", buffering=0) as file:
            while (missing := size - file.tell()) > 0:
                file.write(bytes(missing))


def write_as(name: str) -> None:
    """Write the metrics of this process to the files of ``name``.

    A restarted process that has the name of its predecessor continues the predecessor's values, so
    that the number of files stays bounded. Call this function before `Metrics` is created.
    """
    setattr(values, "MmapedDict", ReservedValues)  # noqa: B010 - not exported
    values.ValueClass = values.MultiProcessValue(lambda: name)  # type: ignore[no-untyped-call]


def forget_process(folder: Path, name: str) -> None:
    """Remove the gauges of a process that has exited; its counters stay."""
    multiprocess.mark_process_dead(name, str(folder))  # type: ignore[no-untyped-call]


def count_restarts(folder: Path, kinds: Iterable[str]) -> Mapping[str, Counter]:
    """Return the counters of restarts by kind of process, and note that the server has started.

    The environment of the supervisor does not name the folder afterwards, since the folder ends
    with the server.
    """
    class_before = values.ValueClass
    os.environ[FOLDER] = str(folder)
    write_as("supervisor")
    try:
        started = Gauge(
            "process_start_time_seconds",
            "Start time of the server since unix epoch in seconds.",
            registry=None,
            multiprocess_mode="max",
        )
        started.set_to_current_time()
        restarts = Counter(
            "cloze_process_restarts",
            "Processes that ended or hung and were started again.",
            ("kind",),
            registry=None,
        )
        return {kind: restarts.labels(kind) for kind in kinds}
    finally:
        values.ValueClass = class_before
        del os.environ[FOLDER]
