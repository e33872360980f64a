"""Reads how many cores and how much memory the control group of this process may use.

A container is a control group.
"""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
"""Folder in which Linux publishes the limits of the process's control group."""


def available_cpus(control_group: Path = _CGROUP, cores: int | None = None) -> int:
    """Return the number of cores that this process may use.

    The number is the smaller of two: the cores of the process's affinity, and the CPU quota of its
    control group (version 2 or 1), rounded up.

    Args:
        control_group: the folder of the control group.
        cores: number of cores in the affinity; None asks the operating system.
    """
    cores = cores or len(os.sched_getaffinity(0))
    for read_quota in (_quota_v2, _quota_v1):
        if (quota := read_quota(control_group)) is not None:
            return max(1, min(cores, math.ceil(quota)))
    return cores


def _quota_v2(control_group: Path) -> float | None:
    try:
        quota, period = (control_group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(control_group: Path) -> float | None:
    try:
        quota = int((control_group / "cpu/cpu.cfs_quota_us").read_text())
        period = int((control_group / "cpu/cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError):
        return None


def memory_limit(control_group: Path = _CGROUP) -> int | None:
    """Return the bytes that this process's control group may use; None: no limit.

    Args:
        control_group: the folder of the control group, of version 2 or 1.
    """
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (control_group / name).read_text().strip()
        except OSError:
            continue
        # Version 1 has a huge number where there is no limit.
        return int(text) if text.isdigit() and int(text) < 2**60 else None
    return None
