"""The memory and the processor time of all processes of a server together."""

from collections.abc import Iterator
from contextlib import suppress

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


def used_by_all(supervisor: int) -> Iterator[Metric]:
    """Yield the memory and the processor time of a supervisor and its children.

    The processor time does not decrease when a process ends. Several tries read what all use while
    none of them ends.
    """
    import psutil  # takes 25 ms, and a single process does without

    parent = psutil.Process(supervisor)
    for _ in range(3):
        with suppress(psutil.Error):  # a child ended meanwhile
            ended_s = sum(parent.cpu_times()[2:4])  # of children that have ended
            processes = [parent, *parent.children()]
            resident = sum(process.memory_info().rss for process in processes)
            running_s = sum(sum(process.cpu_times()[:4]) for process in processes)
            if sum(parent.cpu_times()[2:4]) == ended_s:
                break
    else:
        return
    yield GaugeMetricFamily(
        "process_resident_memory_bytes",
        "Resident memory of all processes of the server; what they share counts for each.",
        resident,
    )
    yield CounterMetricFamily(
        "process_cpu_seconds",
        "Processor time of all processes of the server, in seconds.",
        running_s,
    )
