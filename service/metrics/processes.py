"""The metrics of several processes of one server, which write them to a shared folder."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from prometheus_client import Counter, Gauge, Metric, multiprocess, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.mmap_dict import MmapedDict

from cloze.service.metrics.families import MODEL, RELOAD_RESULTS, RELOADS, model_labels

_READ_AT_MOST = 3
"""Most tries to read what all processes use while none of them ends."""


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


class SupervisorMetrics:
    """Counts what only the supervisor sees, and notes when the server started.

    Args:
        folder: the metrics of all processes.
        kinds: the kinds of processes, whose restarts are counted from zero.
    """

    def __init__(self, folder: Path, kinds: tuple[str, ...]) -> None:
        with _sharing(folder):
            restarts = Counter(
                "cloze_process_restarts",
                "Processes that ended or hung and were started again.",
                ("kind",),
                registry=None,
            )
            self._restarts = {kind: restarts.labels(kind) for kind in kinds}
            reloads = Counter(*RELOADS, registry=None)
            self._reloads = {ok: reloads.labels(name) for ok, name in RELOAD_RESULTS.items()}
            started = Gauge(
                "process_start_time_seconds",
                "Start time of the server since unix epoch in seconds.",
                registry=None,
                multiprocess_mode="max",
            )
            started.set_to_current_time()

    def observe_restart(self, kind: str) -> None:
        """Count a restart of a process."""
        self._restarts[kind].inc()

    def observe_reload(self, *, ok: bool) -> None:
        """Count a reload, or one that could not be served."""
        self._reloads[ok].inc()


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


# ---- what all processes use ----------------------------------------------------------------------


class _Usage(NamedTuple):
    """What a process has used.

    Attributes:
        ticks: processor time of the process, in ticks of the clock.
        ended_ticks: processor time of its children that have ended.
        pages: pages of resident memory.
    """

    ticks: int
    ended_ticks: int
    pages: int

    @classmethod
    def of(cls, pid: int | str) -> Self:
        """Read the usage; raise `OSError` if there is no such process (proc(5), /proc/pid/stat)."""
        text = Path(f"/proc/{pid}/stat").read_text()
        fields = [int(field) for field in text.rpartition(")")[2].split()[1:]]  # after the state
        return cls(fields[10] + fields[11], fields[12] + fields[13], fields[20])


def used_by_all(supervisor: int) -> Iterator[Metric]:
    """Yield the memory and the processor time of a supervisor and its children, if /proc has them.

    The processor time does not decrease when a process ends.
    """
    for _ in range(_READ_AT_MOST):
        try:
            first = _Usage.of(supervisor)
            children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
            usages = [first, *map(_Usage.of, children)]
            if _Usage.of(supervisor).ended_ticks == first.ended_ticks:
                break
        except OSError:
            continue  # a child ended meanwhile, or the system has no /proc
    else:
        return
    yield GaugeMetricFamily(
        "process_resident_memory_bytes",
        "Resident memory of all processes of the server; what they share counts for each.",
        sum(usage.pages for usage in usages) * os.sysconf("SC_PAGE_SIZE"),
    )
    ticks = sum(usage.ticks + usage.ended_ticks for usage in usages)
    yield CounterMetricFamily(
        "process_cpu_seconds",
        "Processor time of all processes of the server, in seconds.",
        ticks / os.sysconf("SC_CLK_TCK"),
    )
