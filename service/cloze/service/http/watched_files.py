"""Files that a running server reads again when they change: keys and certificates."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

log = logging.getLogger("cloze")


class WatchedFiles:
    """Files that are read together; if they cannot be used, what was read before stays.

    Args:
        read: reads the files, or raises `StartupError` and changes nothing.
        name: what they are, in the plural, for the log.

    Attributes:
        problem: why the files could not be used when they were last looked at; "" if they could.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], None], name: str) -> None:
        self._paths, self._read, self._name = paths, read, name
        self._seen: object = None
        self.problem = ""

    def read(self) -> None:
        """Read the files.

        Raises:
            StartupError: a file cannot be used.
        """
        state = [_state(path) for path in self._paths]  # before, so that no change is missed
        self._read()
        self._seen, self.problem = state, ""

    def look(self) -> None:
        """Read the files again if they have changed. A problem is logged once."""
        if [_state(path) for path in self._paths] == self._seen:
            self.problem = ""
            return
        try:
            self.read()
            log.info("read the %s again", self._name)
        except Exception as error:  # else no further look would come
            if str(error) != self.problem:
                self.problem = str(error)
                log.error("the old %s stay: %s", self._name, error)


def _state(path: Path) -> object:
    """Return what differs after a change of a file's content, name or permissions."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
