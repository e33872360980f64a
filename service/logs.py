"""The log lines of a server, as text or as JSON, on standard error."""

import atexit
import logging
import os
import select
import sys
import threading
from collections import deque
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from cloze.service.core import StartupError

LogFormat = Literal["text", "json"]

_STDERR = 2
_CHUNK_BYTES = 4096
_MOST_WAITING = 20_000
_LAST_WAIT_S = 1.0
"""Longest wait for a reader at the end of the process, per chunk."""

_TEXT = "%(asctime)s %(levelname)s %(message)s"


def start_logging(level: str, form: LogFormat) -> None:
    """Log to standard error from now on.

    Args:
        level: the lowest level.
        form: the format of a line.
    """
    handler = _Handler()
    handler.setFormatter(_JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def announce(text: str) -> None:
    """Log a line at level info.

    Raises:
        StartupError: standard error cannot be written; a logger would ignore the error.
    """
    log = logging.getLogger("cloze")
    if not log.isEnabledFor(logging.INFO):
        return
    [handler] = logging.getLogger().handlers
    record = log.makeRecord("cloze", logging.INFO, __file__, 0, text, (), None)
    try:
        sys.stderr.write(f"{handler.format(record)}\n")
        sys.stderr.flush()
    except OSError as error:
        raise StartupError(
            f"the log (standard error) cannot be written: {error.strerror}"
        ) from error


class LineWriter:
    """Writes lines to standard error; a slow or stuck reader never blocks a caller for long.

    A pipe that is ready for writing takes at least `_CHUNK_BYTES` at once, so a write of so many
    bytes after a poll does not wait, and lines of several processes do not mix.

    Args:
        most_waiting: lines that may wait; further ones are counted instead.
    """

    def __init__(self, most_waiting: int = _MOST_WAITING) -> None:
        self._most = most_waiting
        self._waiting: deque[bytes] = deque()
        self._dropped = 0
        self._lock = threading.Lock()
        atexit.register(self.flush, _LAST_WAIT_S)

    def add(self, line: str) -> None:
        """Keep a line, with its line end, for the next `flush`."""
        if len(self._waiting) >= self._most:
            self._dropped += 1
            return
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._waiting.append(b"%d lines are missing: the log was read too slowly\n" % dropped)
        self._waiting.append(line.encode(errors="backslashreplace"))

    def flush(self, wait_s: float) -> None:
        """Write the lines that wait, while each chunk finds room within ``wait_s`` seconds."""
        if not self._lock.acquire(timeout=wait_s):
            return  # another thread writes them
        try:
            while self._waiting and self._has_room(wait_s):
                os.write(_STDERR, self._chunk())
        except OSError:
            self._waiting.clear()  # nobody can read them
        finally:
            self._lock.release()

    def _has_room(self, wait_s: float) -> bool:
        poll = select.poll()
        poll.register(_STDERR, select.POLLOUT)
        return bool(poll.poll(wait_s * 1000))

    def _chunk(self) -> bytes:
        """Return the next lines, or the next part of a line that is longer than a chunk."""
        chunk = self._waiting.popleft()
        if len(chunk) > _CHUNK_BYTES:
            self._waiting.appendleft(chunk[_CHUNK_BYTES:])
            return chunk[:_CHUNK_BYTES]
        while self._waiting and len(chunk) + len(self._waiting[0]) <= _CHUNK_BYTES:
            chunk += self._waiting.popleft()
        return chunk


WRITER = LineWriter()
"""Writes all log lines of this process."""


class _Handler(logging.Handler):
    """Passes records to `WRITER`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record now if there is room."""
        WRITER.add(f"{self.format(record)}\n")
        WRITER.flush(0)

    def flush(self) -> None:
        """Write what waits, before the process ends."""
        WRITER.flush(_LAST_WAIT_S)


class _JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, message and, for a bug, its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {
            "time": iso_time(record.created),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(values, default=str).decode()


def iso_time(seconds: float) -> str:
    """Return seconds since the epoch as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
