"""The metrics of several processes of one server, which write them to a shared folder."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Counter, Gauge, multiprocess, values
from prometheus_client.mmap_dict import MmapedDict

from cloze.service.metrics.metrics import (
    LAST_RELOAD,
    MODEL,
    RELOAD_RESULTS,
    RELOADS,
    model_labels,
)

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def share_folder(folder: Path) -> dict[str, str]:
    """Return the environment variables of processes that write their metrics to ``folder``.

    prometheus_client reads the variables when it is imported.
    """
    return {_FOLDER: str(folder)}


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
        name: the name of the process.
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


class SupervisorMetrics(NamedTuple):
    """What only the supervisor counts.

    Attributes:
        restarts: restarts of processes, by their kind.
        reloads: reloads that were served (True), and that could not be (False).
        last_reload: 1 unless the last reload could not be served.
    """

    restarts: Mapping[str, Counter]
    reloads: Mapping[bool, Counter]
    last_reload: Gauge

    def observe_reload(self, *, ok: bool) -> None:
        """Record a reload, or one that could not be served."""
        self.reloads[ok].inc()
        self.last_reload.set(ok)


def supervisor_metrics(folder: Path, kinds: Iterable[str]) -> SupervisorMetrics:
    """Return the counters of the supervisor, and note that the server has started.

    Args:
        folder: the metrics of all processes. The environment of the supervisor does not name it
            afterwards, since the folder ends with the server.
        kinds: the kinds of processes, whose restarts are counted from zero.
    """
    class_before, folder_before = values.ValueClass, os.environ.get(_FOLDER)
    os.environ[_FOLDER] = str(folder)
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
        reloads = Counter(*RELOADS, registry=None)
        last_reload = Gauge(*LAST_RELOAD, registry=None, multiprocess_mode="max")
        last_reload.set(1)
        return SupervisorMetrics(
            {kind: restarts.labels(kind) for kind in kinds},
            {ok: reloads.labels(name) for ok, name in RELOAD_RESULTS.items()},
            last_reload,
        )
    finally:
        values.ValueClass = class_before
        if folder_before is None:
            del os.environ[_FOLDER]
        else:
            os.environ[_FOLDER] = folder_before
