"""The metrics of several processes of one server, which write them to a shared folder."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from prometheus_client import Counter, Gauge, multiprocess, values

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Variable of the folder of metrics, which prometheus_client reads when it is imported."""


def write_as(name: str) -> None:
    """Write the metrics of this process to the files of ``name``.

    A restarted process that has the name of its predecessor continues the predecessor's values, so
    that the number of files stays bounded. Call this function before `Metrics` is created.
    """
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
