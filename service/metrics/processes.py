"""The metrics of several processes of one server, which write them to a shared folder."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import Counter, multiprocess, values
from prometheus_client.mmap_dict import MmapedDict

from cloze.service.metrics.families import MODEL, model_labels


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


def forget_other_models(folder: Path, name: str, models: Iterable[str]) -> None:
    """Remove the series of models that are served no more from the files of an exited process.

    Its other counts stay, so that no sum over all processes decreases.

    Args:
        folder: the metrics of all processes.
        name: of the process.
        models: the full names of the models that are served.
    """
    kept = {model_labels(reference) for reference in ("", *models)}
    for file in folder.glob(f"*_{name}.db"):
        unfinished = file.with_suffix(".new")
        copy = MmapedDict(str(unfinished))  # type: ignore[no-untyped-call]
        for key, value, time, _ in MmapedDict.read_all_values_from_file(str(file)):  # type: ignore[no-untyped-call]
            labels = json.loads(key)[2]
            if tuple(labels.get(label, "") for label in MODEL) in kept:
                copy.write_value(key, value, time)  # type: ignore[no-untyped-call]
        copy.close()  # type: ignore[no-untyped-call]
        unfinished.replace(file)  # so that a scrape reads the one or the other


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
