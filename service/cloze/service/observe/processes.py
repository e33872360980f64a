"""The metrics of several processes of one server, which write them to a shared folder."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from prometheus_client import Counter, Gauge, multiprocess, values
from prometheus_client.mmap_dict import MmapedDict

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Variable of the folder of metrics, which prometheus_client reads when it is imported."""

_LEAST_BYTES = 65_536
"""Size of a new file of prometheus_client, which doubles the size when a value has no room."""


class ReservedValues(MmapedDict):
    """The values of metrics in a mapped file, whose space on the disk is reserved before its use.

    prometheus_client reserves nothing, and the kernel ends a process that writes to a mapped page
    for which the disk has no space (SIGBUS). Here a value without space stays in its metric. It is
    written with the first change that finds space.
    """

    def __init__(self, filename: str) -> None:
        self._path = Path(filename)
        self._f = None  # type: ignore[assignment]  # until the file has its first bytes
        self._positions: dict[str, int] = {}

    def read_value(self, key: str) -> tuple[float, float]:
        """Return a value and its time; zeros if there is no space for the value."""
        return super().read_value(key) if self._holds(key) else (0.0, 0.0)  # type: ignore[no-untyped-call]

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        """Write a value if there is space for it."""
        if self._holds(key):
            super().write_value(key, value, timestamp)  # type: ignore[no-untyped-call]

    def _holds(self, key: str) -> bool:
        """Return whether a key has space; reserve the space first if it is new."""
        if key in self._positions:
            return True
        try:
            if self._f is None:
                self._reserve(_LEAST_BYTES)
                super().__init__(str(self._path))
            size, needed = self._capacity, self._used + len(key.encode()) + 32
            while size < needed:
                size *= 2
            self._reserve(size)
        except OSError:
            with suppress(OSError):  # a scrape cannot read a file without its first bytes
                if self._path.stat().st_size < _LEAST_BYTES:
                    self._path.unlink()
            return False
        return True

    def _reserve(self, size: int) -> None:
        """Write zeros behind the content of the file up to a size in bytes.

        Raises:
            OSError: the disk is full.
        """
        with self._path.open("ab", buffering=0) as file:
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
