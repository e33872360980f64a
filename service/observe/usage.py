"""The memory and the processor time of all processes of a server together."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

_READ_AT_MOST = 3
"""Most tries to read what all processes use while none of them ends."""


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
