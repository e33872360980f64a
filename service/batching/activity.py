"""How many workers of a process are busy, so that a lone batch can use all cores."""

import threading


class Activity:
    """Counts the busy workers of all schedulers of a process. Any thread may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = 0

    @property
    def is_alone(self) -> bool:
        """Whether one worker is busy."""
        return self._busy == 1

    def begin(self) -> None:
        """Count a worker that begins to look for work."""
        with self._lock:
            self._busy += 1

    def end(self) -> None:
        """Count off a worker that begins to wait, or ends."""
        with self._lock:
            self._busy -= 1
