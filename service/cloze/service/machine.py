"""What a server asks of the operating system besides files, with a fallback for each question."""

import ctypes
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

_CONTROL_GROUP: Final = Path("/sys/fs/cgroup")
"""Folder in which Linux publishes the limits of the process's control group: of the container."""

_SOCKETS_OF_WINDOWS = 512
"""Most sockets of Python's event loop on Windows, which has no limit of open files."""


def available_cpus(control_group: Path = _CONTROL_GROUP, cores: int | None = None) -> int:
    """Return the number of cores that this process may use.

    The number is the smaller of two: the cores of the process's affinity, and the CPU quota of its
    control group (version 2 or 1), rounded up. On macOS and Windows, all cores count.

    `control_group` is the folder in which Linux publishes the group's limits. `cores` is the number
    of cores in the affinity; None asks the operating system.
    """
    cores = cores or _cores()
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # no such file; no quota is "max"
            text = " ".join((control_group / name).read_text() for name in names)
            quota, period = map(int, text.split())
            if quota > 0:  # no quota is -1
                return max(1, min(cores, math.ceil(quota / period)))
    return cores


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_limit(control_group: Path = _CONTROL_GROUP) -> int | None:
    """Return the bytes that this process's control group (version 2 or 1) may use; None: no limit.

    Only Linux has control groups.
    """
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError):
            text = (control_group / name).read_text().strip()
            # Version 1 has a huge number where there is no limit.
            return int(text) if text.isdigit() and int(text) < 2**60 else None
    return None


def memory_used(control_group: Path = _CONTROL_GROUP) -> int | None:
    """Return the bytes that count towards `memory_limit`; None if the system does not say.

    Pages of files that the kernel can drop at once are left out, as the kubelet does.
    """
    for usage, stat, droppable in (
        ("memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        with suppress(OSError):
            used = int((control_group / usage).read_text())
            lines = (control_group / stat).read_text().splitlines()
            values = dict(line.split() for line in lines)
            return max(0, used - int(values.get(droppable, 0)))
    return None


def memory_state(control_group: Path = _CONTROL_GROUP) -> tuple[int, int]:
    """Return the bytes in use and the most bytes: of the control group, or else of the machine."""
    limit, used = memory_limit(control_group), memory_used(control_group)
    if limit is not None and used is not None:
        return used, limit
    import psutil  # takes 25 ms, which a start does without

    memory = psutil.virtual_memory()
    return memory.total - memory.available, memory.total


def raise_file_limit(most: int) -> int:
    """Raise the limit of open files of this process to `most`, as far as allowed; return the limit.

    Without such a limit (Windows), return the most sockets of the event loop.
    """
    if sys.platform == "win32":
        return _SOCKETS_OF_WINDOWS
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft < wanted:
        with suppress(ValueError):  # macOS may take less, or refuse
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def lower_thread_priority(nice: int) -> None:
    """Lower the priority of the calling thread; only Linux has a priority per thread."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends; only Linux can.

    Elsewhere a child looks at its parent from time to time; see `processes.children`.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def write_gate(descriptor: int) -> Callable[[float], bool]:
    """Return a function that waits for so many seconds until a pipe or file takes bytes.

    The function returns whether it does. On Windows, which cannot tell, it returns True at once,
    and a write may wait.
    """
    if sys.platform == "win32":
        return lambda _: True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return lambda seconds: bool(poll.poll(seconds * 1000))
