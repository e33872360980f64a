"""How the supervisor's children start: their configuration, and that they end with their parent."""

import asyncio
import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from cloze.service.settings import Settings

BEAT_S = 1.0
"""Time between a child's reports that its event loop runs."""

_PR_SET_PDEATHSIG = 1
"""Of Linux's ``prctl``."""


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """The configuration of a child process, which is its only argument.

    Attributes:
        name: of the child.
        engine_sockets: of all engine processes, which accept front ends there.
        ready: descriptor to which the child writes a byte when it is ready, and then regularly.
        listeners: descriptors of the listening sockets: of an engine its own, of a front end those
            of HTTP.
        device_id: which GPU; for an engine.
        parent: the supervisor's process id.
        settings: see `Settings`.
    """

    name: str
    engine_sockets: tuple[Path, ...]
    ready: int
    listeners: tuple[int, ...]
    device_id: int
    parent: int
    settings: Settings

    def to_argument(self) -> str:
        """Return the configuration as JSON."""
        sockets = [str(path) for path in self.engine_sockets]
        settings = self.settings.model_dump(mode="json")
        return json.dumps(asdict(self) | {"engine_sockets": sockets, "settings": settings})

    @classmethod
    def from_arguments(cls) -> "ChildConfig":
        """Return this process's configuration; from now on the process ends with its parent."""
        body = json.loads(sys.argv[1])
        config = cls(
            **body
            | {
                "engine_sockets": tuple(map(Path, body["engine_sockets"])),
                "listeners": tuple(body["listeners"]),
                "settings": Settings(**body["settings"]),
            }
        )
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != config.parent:  # the parent ended before the call
            os._exit(1)
        return config

    def report_ready(self) -> None:
        """Report that the child is ready, and from now on that its event loop runs.

        Call this once, on the event loop. The supervisor replaces a child whose reports stop.
        """
        os.set_blocking(self.ready, False)
        self._beat(asyncio.get_running_loop())

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(BlockingIOError, BrokenPipeError):  # the supervisor is stopped, or ends
            os.write(self.ready, b"1")
        loop.call_later(BEAT_S, self._beat, loop)
