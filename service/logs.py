"""The log lines of a server, as text or as JSON, on standard error."""

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from cloze.service.core import StartupError

LogFormat = Literal["text", "json"]

_TEXT = "%(asctime)s %(levelname)s %(message)s"


def start_logging(level: str, form: LogFormat) -> None:
    """Log to standard error from now on.

    Args:
        level: the lowest level.
        form: the format of a line.
    """
    handler = logging.StreamHandler(sys.stderr)
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
