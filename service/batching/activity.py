"""How many workers of a process are busy: a lone batch can use all cores, others share them."""

import threading


class Activity:
    """Counts the busy workers of all schedulers of a process. Any thread may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = 0

    @property
    def busy(self) -> int:
        """Number of busy workers."""
        return self._busy

    def begin(self) -> None:
        """Count a worker that begins to look for work."""
        with self._lock:
            self._busy += 1

    def end(self) -> None:
        """Count off a worker that begins to wait, or ends."""
        with self._lock:
            self._busy -= 1
