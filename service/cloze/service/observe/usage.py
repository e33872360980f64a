"""The memory and the processor time of all processes of a server together."""

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


def _usage(pid: int | str) -> tuple[int, int, int]:
    """Return what a process has used; raise `OSError` if there is none (proc(5), /proc/pid/stat).

    The values are its ticks of processor time, those of its children that have ended, and its pages
    of resident memory.
    """
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = [int(field) for field in text.rpartition(")")[2].split()[1:]]  # after the state
    return fields[10] + fields[11], fields[12] + fields[13], fields[20]


def used_by_all(supervisor: int) -> Iterator[Metric]:
    """Yield the memory and the processor time of a supervisor and its children, if /proc has them.

    The processor time does not decrease when a process ends. Several tries read what all use while
    none of them ends.
    """
    for _ in range(3):
        try:
            first = _usage(supervisor)
            children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
            usages = [first, *map(_usage, children)]
            if _usage(supervisor)[1] == first[1]:
                break
        except OSError:
            continue  # a child ended meanwhile, or the system has no /proc
    else:
        return
    yield GaugeMetricFamily(
        "process_resident_memory_bytes",
        "Resident memory of all processes of the server; what they share counts for each.",
        sum(pages for _, _, pages in usages) * os.sysconf("SC_PAGE_SIZE"),
    )
    ticks = sum(ticks + ended_ticks for ticks, ended_ticks, _ in usages)
    yield CounterMetricFamily(
        "process_cpu_seconds",
        "Processor time of all processes of the server, in seconds.",
        ticks / os.sysconf("SC_CLK_TCK"),
    )
