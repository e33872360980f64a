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

from cloze.service.core import BUSY, Changes, ReloadRefused, ShuttingDown

_FILE = "reload.json"

_LOOK_EVERY_S = 0.05


@dataclass(slots=True)
class ReloadReport:
    """What came of the last reload.

    Attributes:
        began: `time.monotonic` time of its begin; the clock is the same in all processes.
        changes: what it changed; None if it was refused, or has not ended.
        error: why it was refused; "" if it was not.
        busy: whether a further reload has to wait: new processes start, or old ones still run.
    """

    began: float = 0.0
    changes: Changes | None = None
    error: str = ""
    busy: bool = False

    def write(self, folder: Path) -> None:
        """Replace the report of the last reload."""
        unfinished = folder / f"{_FILE}.new"
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(folder / _FILE)

    @classmethod
    def read(cls, folder: Path) -> "ReloadReport":
        """Return the report of the last reload; of none if there was no reload."""
        try:
            fields = json.loads((folder / _FILE).read_text())
        except FileNotFoundError:
            return cls()
        changes = fields.pop("changes")
        return cls(**fields, changes=changes and Changes(**changes))


async def ask_supervisor(supervisor: int, folder: Path, is_draining: Callable[[], bool]) -> Changes:
    """Ask the supervisor to reload; return what has changed.

    Args:
        supervisor: its process id.
        folder: that all processes share.
        is_draining: whether this process ends.

    Raises:
        ReloadRefused: the supervisor refused the reload, or another one has not ended.
        ShuttingDown: the server ends.
    """
    if ReloadReport.read(folder).busy:
        raise ReloadRefused(BUSY)
    asked = time.monotonic()
    os.kill(supervisor, signal.SIGHUP)
    while True:
        report = ReloadReport.read(folder)
        if report.began >= asked:
            if report.changes is not None:
                return report.changes
            if report.error:
                raise ReloadRefused(report.error)
        elif report.busy:  # another one began just before
            raise ReloadRefused(BUSY)
        if is_draining():
            raise ShuttingDown("the server is shutting down")
        await asyncio.sleep(_LOOK_EVERY_S)
