"""The access log: one line per answered request, never its content.

The event loop only appends a record; a thread formats the records and writes them in batches.
"""

import atexit
import logging
import random
import sys
import threading
import time
from collections import deque
from datetime import datetime
from typing import Any, Final, NamedTuple

import orjson

from cloze.service.core import Timings
from cloze.service.logs import LogFormat, iso_time

_WRITE_EVERY_S = 0.1
_MOST_WAITING: Final = 20_000
"""Records that may wait for the thread; further ones are counted instead."""

_CHUNK_BYTES = 4096
"""Most bytes per write: a pipe takes so many at once, so lines of several processes do not mix."""

log = logging.getLogger("cloze")


class RequestCost(NamedTuple):
    """The cost of an answered request: texts, tokens, and the parts of its time."""

    texts: int
    tokens: int
    timings: Timings


class AccessRecord(NamedTuple):
    """An answered request.

    Attributes:
        time: seconds since the epoch at its end.
        request_id: its id.
        method, route: its method, and its path if the server has such a route.
        model: the full name of the model; "" if none was chosen.
        status: the HTTP status.
        seconds: seconds from the first byte to the answer.
        cost: the cost of a result; None for an error, or a request that runs no model.
        error: the kind of error; "" for a result.
    """

    time: float
    request_id: str
    method: str
    route: str
    model: str
    status: int
    seconds: float
    cost: RequestCost | None
    error: str

    @property
    def level(self) -> int:
        """The level of the line: error for 5xx, warning for 4xx."""
        if self.status >= 500:
            return logging.ERROR
        return logging.WARNING if self.status >= 400 else logging.INFO


class AccessLog:
    """Writes the lines of one process to standard error.

    Args:
        form: the format of a line.
        level: the lowest level of a line.
        share: the share of the results to log, in [0, 1]; errors are always logged.
        quiet_routes: routes of probes and scrapes, whose results are logged only at debug.
    """

    def __init__(
        self, form: LogFormat, level: int, share: float, quiet_routes: frozenset[str]
    ) -> None:
        self._form, self._level, self._share = form, level, share
        self._quiet = quiet_routes if level > logging.DEBUG else frozenset()
        self._waiting: deque[AccessRecord] = deque()
        self._dropped = 0
        self._writing = threading.Lock()
        threading.Thread(target=self._write_often, name="access log", daemon=True).start()
        atexit.register(self.flush)

    def add(self, record: AccessRecord) -> None:
        """Log a request. Call this method on the event loop."""
        if record.level < self._level:
            return
        if record.status < 400 and (
            record.route in self._quiet or (self._share < 1 and random.random() >= self._share)
        ):
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._dropped += 1
        else:
            self._waiting.append(record)

    def flush(self) -> None:
        """Write all lines that wait."""
        with self._writing:
            lines = []
            while self._waiting:
                lines.append(_line(self._form, self._waiting.popleft()))
            dropped, self._dropped = self._dropped, 0
        if lines:
            _write(lines)
        if dropped:
            log.warning("%d requests have no line: the log was written too slowly", dropped)

    def _write_often(self) -> None:
        while True:
            time.sleep(_WRITE_EVERY_S)
            self.flush()


def _line(form: LogFormat, record: AccessRecord) -> str:
    """Return the line of a request, with its line end."""
    level = logging.getLevelName(record.level)
    cost, ms = record.cost, {"total": record.seconds}
    if cost is not None:
        parts = cost.timings
        ms |= {"tokenize": parts.tokenize_s, "queue": parts.queue_s, "inference": parts.inference_s}
    rounded = {name: round(seconds * 1000, 2) for name, seconds in ms.items()}
    fields: dict[str, Any] = {"id": record.request_id}
    if record.model:
        fields["model"] = record.model
    if cost is not None:
        fields |= {"texts": cost.texts, "tokens": cost.tokens}
    if record.error:
        fields["error"] = record.error
    if form == "json":
        values = {
            "time": iso_time(record.time),
            "level": level.lower(),
            "message": "request",
            "method": record.method,
            "route": record.route,
            "status": record.status,
            **fields,
            "ms": rounded,
        }
        return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE).decode()
    shown = {**fields, **{f"{name}_ms": value for name, value in rounded.items()}}
    pairs = " ".join(f"{name}={value}" for name, value in shown.items())
    at = datetime.fromtimestamp(record.time).strftime("%Y-%m-%d %H:%M:%S")  # as logging
    milliseconds = int(record.time * 1000) % 1000
    begin = f"{at},{milliseconds:03d} {level} {record.method} {record.route} {record.status}"
    return f"{begin} {pairs}\n"


def _write(lines: list[str]) -> None:
    """Write lines to standard error, in chunks; a log that cannot be written stops no request."""
    chunk: list[str] = []
    size = 0
    try:
        for line in lines:
            if chunk and size + len(line) >= _CHUNK_BYTES:
                sys.stderr.write("".join(chunk))
                sys.stderr.flush()
                chunk, size = [], 0
            chunk.append(line)
            size += len(line)
        sys.stderr.write("".join(chunk))
        sys.stderr.flush()
    except (OSError, ValueError):
        return
