"""The metrics of several processes of one server, which write them to a shared folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
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
        with _sharing(folder):
            counter = Counter(
                "cloze_process_restarts",
                "Processes that ended or hung and were started again.",
                ("kind",),
                registry=None,
            )
            self._counters = {kind: counter.labels(kind) for kind in kinds}

    def add(self, kind: str) -> None:
        """Count a restart."""
        self._counters[kind].inc()


@contextmanager
def _sharing(folder: Path) -> Iterator[None]:
    """Let metrics that are created meanwhile be those of all processes.

    The supervisor's own environment must stay: its folder ends with the server.
    """
    before, environment = values.ValueClass, os.environ.copy()
    os.environ.update(share_folder(folder))
    write_as("supervisor")
    try:
        yield
    finally:
        values.ValueClass = before
        for name in share_folder(folder):
            os.environ.pop(name)
            if name in environment:
                os.environ[name] = environment[name]
