"""A generation of processes: the engine processes and front ends of one state of the store.

A reload starts a new generation. The old one answers the connections that it has, and then ends.
"""

import math
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from cloze.model_store import Bundle, Manifest
from cloze.service.core import Changes, StartupError
from cloze.service.processes.child import Child, end_all
from cloze.service.settings import Settings

ENGINE_COMMAND = (sys.executable, "-m", "cloze.service.processes.engine_process")
FRONTEND_COMMAND = (sys.executable, "-m", "cloze.service.processes.frontend")

RETIRE = signal.SIGUSR1
"""Tells a front end to accept no further connection, and to end after those that it has."""

_BACKLOG = 1024
"""Front ends that may wait for an engine process: at most 256, and some that died meanwhile."""

_END_GRACE_S = 10.0


@dataclass(slots=True, eq=False)
class Generation:
    """The processes that serve one state of the store.

    Attributes:
        number: 1 for the first generation; a later one has a number that no other has then.
        settings: of the processes; they name each bundle with its version.
        manifests: of the served bundles.
        sockets: of the engine processes.
        engines: the engine processes.
        front_ends: the front ends.
        ends: `time.monotonic` time at which a retired generation is ended; None: not retired.
    """

    number: int
    settings: Settings
    manifests: tuple[Manifest, ...]
    sockets: tuple[Path, ...]
    engines: list[Child]
    front_ends: list[Child]
    ends: float | None = field(default=None)

    @property
    def children(self) -> list[Child]:
        """All processes."""
        return [*self.engines, *self.front_ends]

    def retire(self) -> None:
        """Let the front ends finish the connections that they have.

        One that is only starting has none, and ends by the signal at once.
        """
        settings = self.settings
        longest_s = settings.idle_timeout_ms / 1000 + settings.max_timeout_s
        self.ends = time.monotonic() + longest_s
        for child in self.front_ends:
            child.is_kept = False
            if child.process is not None:
                child.process.send_signal(RETIRE)

    def end_if_over(self) -> bool:
        """End the engine processes of a retired generation after its last front end.

        Returns:
            Whether the generation has ended.
        """
        assert self.ends is not None
        if running := [child.process for child in self.front_ends if child.process is not None]:
            if time.monotonic() > self.ends:
                self.ends = math.inf  # their drain has its own limit
                for process in running:
                    process.terminate()
            return False
        end_all(self.engines, _END_GRACE_S)  # they have no work, and so end at once
        self._close()
        return True

    def end(self) -> None:
        """End all processes, and accept no further front end."""
        end_all(self.front_ends, self.settings.shutdown_grace_ms / 1000 + _END_GRACE_S)
        end_all(self.engines, _END_GRACE_S)
        self._close()

    def _close(self) -> None:
        for child in self.children:
            child.close_reports()
        for child, path in zip(self.engines, self.sockets, strict=True):
            child.listeners[0].close()
            path.unlink(missing_ok=True)

    def changes(self, later: "Generation") -> Changes:
        """Return how the models of a later generation differ."""
        return Changes.between(*({m.reference: m for m in g.manifests} for g in (self, later)))


def make_generation(
    number: int,
    settings: Settings,
    bundles: list[Bundle],
    listeners: tuple[socket.socket, ...],
    folder: Path,
    engine_command: tuple[str, ...],
) -> Generation:
    """Return a generation whose processes have not started.

    Args:
        number: see `Generation`.
        settings: the operator's settings.
        bundles: the bundles to serve.
        listeners: the HTTP sockets.
        folder: receives the engines' sockets.
        engine_command: starts an engine process.

    Raises:
        StartupError: a path is too long.
    """
    # By version: a restarted process must not serve what was published in the meantime.
    references = tuple(bundle.manifest.reference for bundle in bundles)
    suffix = f".{number}" if number > 1 else ""
    sockets = tuple(folder / f"engine-{n}{suffix}.sock" for n in range(settings.gpus))
    return Generation(
        number,
        settings.model_copy(update={"model": references}),
        tuple(bundle.manifest for bundle in bundles),
        sockets,
        [
            Child(f"engine-{device_id}{suffix}", engine_command, (_listen(path),), device_id)
            for device_id, path in enumerate(sockets)
        ],
        [
            Child(f"frontend-{n}{suffix}", FRONTEND_COMMAND, listeners)
            for n in range(settings.frontends)
        ],
    )


def _listen(path: Path) -> socket.socket:
    """Return a Unix socket that listens; connections wait until an engine process accepts them."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(os.fspath(path))
    except OSError as error:  # a path has at most 107 bytes
        listener.close()
        raise StartupError(
            f"cannot listen on {path}: {error}; set TMPDIR to a short path"
        ) from error
    listener.listen(_BACKLOG)
    return listener
