"""How the supervisor's children begin: what they are told, and that they end with it."""

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from service.settings import Settings

_PR_SET_PDEATHSIG = 1
"""Of Linux's ``prctl``."""


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """What a child is told, in its one argument.

    Attributes:
        folder: of the sockets between processes.
        name: its own.
        engines: the names of all engines.
        ready: descriptor to write a byte to once it is ready.
        listener: descriptor of the listening socket; -1 for an engine.
        device_id: which GPU; of an engine.
        parent: the supervisor's process id.
        settings: see `Settings`.
    """

    folder: Path
    name: str
    engines: tuple[str, ...]
    ready: int
    listener: int
    device_id: int
    parent: int
    settings: Settings

    def to_argument(self) -> str:
        """For `from_arguments`."""
        body = {
            name: getattr(self, name)
            for name in ("name", "engines", "ready", "listener", "device_id", "parent")
        }
        return json.dumps(
            body | {"folder": str(self.folder), "settings": self.settings.model_dump(mode="json")}
        )

    @classmethod
    def from_arguments(cls) -> "ChildConfig":
        """Of this process, which from now on ends when its parent does."""
        body = json.loads(sys.argv[1])
        config = cls(
            **body
            | {
                "folder": Path(body["folder"]),
                "engines": tuple(body["engines"]),
                "settings": Settings(**body["settings"]),
            }
        )
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != config.parent:  # it ended a moment ago
            os._exit(1)
        return config

    def say_ready(self) -> None:
        """Once; after a restart nobody listens."""
        with suppress(BrokenPipeError):
            os.write(self.ready, b"1")
        os.close(self.ready)
