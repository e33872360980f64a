"""What came of a reload: the supervisor writes it, and front ends that asked for it read it.

A front end asks by SIGHUP to its parent. The report is a file in the folder that all processes of a
server share.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from cloze.service.core import Changes, ReloadRefused, ShuttingDown

_FILE = "reload.json"

_LOOK_EVERY_S = 0.05

_LONGEST_S = 1200.0
"""Longest time until a report; new processes have 600 s to start, engines before front ends."""


@dataclass(slots=True)
class ReloadReport:
    """What came of a reload.

    Attributes:
        asked_before: `time.monotonic` time of its begin; the clock is the same in all processes.
        changes: what it changed; None if it was refused.
        error: why it was refused.
    """

    asked_before: float
    changes: Changes | None = None
    error: str = ""

    def write(self, folder: Path) -> None:
        """Replace the report of the last reload."""
        unfinished = folder / f"{_FILE}.new"
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(folder / _FILE)

    @classmethod
    def read(cls, folder: Path) -> "ReloadReport | None":
        """Return the report of the last reload; None if there was no reload."""
        try:
            fields = json.loads((folder / _FILE).read_text())
        except FileNotFoundError:
            return None
        changes = fields.pop("changes")
        return cls(**fields, changes=changes and Changes(**changes))


async def ask_supervisor(supervisor: int, folder: Path, is_draining: Callable[[], bool]) -> Changes:
    """Ask the supervisor to reload; return what has changed.

    Args:
        supervisor: its process id.
        folder: that all processes share.
        is_draining: whether this process ends.

    Raises:
        ReloadRefused: the supervisor refused the reload, or did not finish it in time.
        ShuttingDown: the server ends.
    """
    asked = time.monotonic()
    os.kill(supervisor, signal.SIGHUP)
    while time.monotonic() < asked + _LONGEST_S:
        report = ReloadReport.read(folder)
        if report is not None and report.asked_before >= asked:
            if report.changes is None:
                raise ReloadRefused(report.error)
            return report.changes
        if is_draining():
            raise ShuttingDown("the server is shutting down")
        await asyncio.sleep(_LOOK_EVERY_S)
    raise ReloadRefused(f"the reload did not end within {_LONGEST_S:.0f} s")
