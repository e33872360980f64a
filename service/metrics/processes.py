"""The metrics of several processes of one server, which write them to a shared folder."""

import os
from pathlib import Path

from prometheus_client import Counter, multiprocess, values


def share_folder(folder: Path) -> dict[str, str]:
    """Return the environment variables of processes that write their metrics to ``folder``.

    prometheus_client reads the variables when it is imported.
    """
    return {"PROMETHEUS_MULTIPROC_DIR": str(folder)}


def write_as(name: str) -> None:
    """Write the metrics of this process to the files of ``name``.

    A restarted process that has the name of its predecessor continues the predecessor's values, so
    that the number of files stays bounded. Call this function before `Metrics` is created.
    """
    values.ValueClass = values.MultiProcessValue(lambda: name)  # type: ignore[no-untyped-call]


def forget_process(folder: Path, name: str) -> None:
    """Remove the gauges of a process that has exited; its counters stay."""
    multiprocess.mark_process_dead(name, str(folder))  # type: ignore[no-untyped-call]


class ProcessRestarts:
    """Counts the restarts of processes. The supervisor has one.

    Args:
        folder: the metrics of all processes.
        kinds: the kinds of processes, whose counts start from zero.
    """

    def __init__(self, folder: Path, kinds: tuple[str, ...]) -> None:
        os.environ.update(share_folder(folder))
        write_as("supervisor")
        self._counter = Counter(
            "cloze_process_restarts",
            "Processes that ended or hung and were started again.",
            ("kind",),
            registry=None,
        )
        for kind in kinds:
            self._counter.labels(kind)

    def add(self, kind: str) -> None:
        """Count a restart."""
        self._counter.labels(kind).inc()
