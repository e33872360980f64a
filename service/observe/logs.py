"""The log lines of a server, as text or as JSON, on standard error.

The access log has one line per answered request, never its content. The event loop only appends a
record; a thread formats the records and writes them in batches.
"""

import atexit
import logging
import os
import random
import re
import select
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Hashable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson

from cloze.service.core import LogFormat, Rejection, StartupError, Timings

_STDERR = 2
_CHUNK_BYTES = 4096
"""Bytes that a pipe which is ready for writing takes at once (`PIPE_BUF` of Linux)."""
_MOST_WAITING = 20_000
"""Most lines that wait for a reader; further lines are counted and dropped."""
_LAST_WAIT_S = 1.0
"""Longest wait for a reader at the end of the process, per chunk."""

_WRITE_EVERY_S = 0.1
"""Time between writes of the access log."""

_REFUSALS = frozenset({401, 403, 429})
"""Statuses that cost the server nothing, so that a client may cause thousands per second."""

_MOST_REFUSALS = 10
"""Most lines per second for refusals of one kind."""

_UNPRINTED = re.compile(r"[^!-~]")

_TEXT = "%(asctime)s %(levelname)s %(message)s"


def start_logging(level: str, form: LogFormat) -> None:
    """Log to standard error from now on, from a level upwards."""
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
        self._poll = select.poll()
        self._poll.register(_STDERR, select.POLLOUT)
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
        waiting = self._waiting
        try:
            while waiting and self._poll.poll(wait_s * 1000):
                chunk = waiting.popleft()
                if len(chunk) > _CHUNK_BYTES:  # the rest of a long line comes next
                    waiting.appendleft(chunk[_CHUNK_BYTES:])
                    chunk = chunk[:_CHUNK_BYTES]
                while waiting and len(chunk) + len(waiting[0]) <= _CHUNK_BYTES:
                    chunk += waiting.popleft()
                os.write(_STDERR, chunk)
        except OSError:
            waiting.clear()  # nobody can read them
        finally:
            self._lock.release()


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
            "time": _iso_time(record.created),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(values, default=str).decode()


def _iso_time(seconds: float) -> str:
    """Return seconds since the epoch as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


# ---- the access log ------------------------------------------------------------------------------


class RequestCost(NamedTuple):
    """The cost of a result: texts, tokens, the parts of its time, and texts that were cut."""

    texts: int
    tokens: int
    timings: Timings
    truncated: int = 0


class AccessRecord(NamedTuple):
    """An answered request, as metrics, span and log line record it.

    Attributes:
        time: seconds since the epoch at its end.
        route: its path if the server has such a route.
        model: the full name of the model; "" if none was chosen.
        seconds: seconds from the end of its headers to the end of its answer.
        cost: the cost of a result; None for an error, or a request that runs no model.
        error: the kind of error; "" for a result.
        rejection: why the server's own state let it fail; None if that did not.
        is_bulk: whether it took only what others left.
        client: who sent it: ``key:NAME``, or an address; "" if unknown.
        key: the name of its API key; "" if it has none.
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
    rejection: Rejection | None = None
    is_bulk: bool = False
    client: str = ""
    key: str = ""


class LineLimit:
    """Lets `_MOST_REFUSALS` lines per second and kind through, and counts the others."""

    def __init__(self) -> None:
        self._second = 0
        self._counts: Counter[Hashable] = Counter()  # of this second
        self._left_out: Counter[Hashable] = Counter()

    def left_out(self, kind: Hashable, now: float) -> int | None:
        """Return how many lines of the kind were left out before this one; None: leave it out.

        Args:
            kind: one of few.
            now: time in seconds.
        """
        if int(now) != self._second:
            self._second = int(now)
            self._counts.clear()
        if self._counts[kind] >= _MOST_REFUSALS:
            self._left_out[kind] += 1
            return None
        self._counts[kind] += 1
        return self._left_out.pop(kind, 0)


class AccessLog:
    """Writes the lines of one process.

    Args:
        form: the format of a line.
        level: the lowest level of a line.
        share: the share of the results to log, in [0, 1]; all errors are logged, except many
            refusals per second.
        quiet_routes: routes of probes and scrapes, whose results are logged only at debug.
        writer: writes the lines.
    """

    def __init__(
        self,
        form: LogFormat,
        level: int,
        share: float,
        quiet_routes: frozenset[str],
        writer: LineWriter = WRITER,
    ) -> None:
        self._form, self._share, self._writer = form, share, writer
        # Results are at level info, other statuses below 500 at level warning.
        logged_from = {logging.DEBUG: 0, logging.INFO: 0, logging.WARNING: 400}
        self._lowest_status = logged_from.get(level, 500)
        self._quiet = quiet_routes if level > logging.DEBUG else frozenset()
        self._waiting: deque[tuple[AccessRecord, int]] = deque()
        self._refusals = LineLimit()
        self._formatting = threading.Lock()

    def begin(self) -> None:
        """Begin to write what is added, until the process ends."""
        threading.Thread(target=self._write_often, name="access log", daemon=True).start()
        atexit.register(self.flush, _WRITE_EVERY_S)

    def add(self, record: AccessRecord) -> None:
        """Log a request. Call this method on the event loop."""
        if record.status < self._lowest_status:
            return
        if record.status < 400 and (
            record.route in self._quiet or (self._share < 1 and random.random() >= self._share)
        ):
            return
        left_out: int | None = 0
        if record.status in _REFUSALS:
            left_out = self._refusals.left_out(record.rejection or record.status, record.time)
        if left_out is not None:
            self._waiting.append((record, left_out))

    def flush(self, wait_s: float) -> None:
        """Write the lines of all records; see `LineWriter.flush`."""
        with self._formatting:
            while self._waiting:
                self._writer.add(_line(self._form, *self._waiting.popleft()))
        self._writer.flush(wait_s)

    def _write_often(self) -> None:
        while True:
            time.sleep(_WRITE_EVERY_S)
            self.flush(_WRITE_EVERY_S)


def _line(form: LogFormat, record: AccessRecord, left_out: int = 0) -> str:
    """Return the line of a request, with its line end.

    Args:
        left_out: the number of refusals of its kind since the last one with a line.
    """
    status, cost = record.status, record.cost
    level = "INFO" if status < 400 else "WARNING" if status < 500 else "ERROR"
    ms = {"total": record.seconds}
    if cost is not None:
        parts = cost.timings
        ms |= {"tokenize": parts.tokenize_s, "queue": parts.queue_s, "inference": parts.inference_s}
    rounded = {name: round(seconds * 1000, 2) for name, seconds in ms.items()}
    fields: dict[str, Any] = {"id": record.request_id}
    if record.client:
        fields["client"] = record.client
    if record.model:
        fields["model"] = record.model
    if cost is not None:
        fields |= {"texts": cost.texts, "tokens": cost.tokens}
    if record.error:
        fields["error"] = record.error
    if left_out:
        fields["left_out"] = left_out
    if form == "json":
        values = {
            "time": _iso_time(record.time),
            "level": level.lower(),
            "message": "request",
            "method": record.method,
            "route": record.route,
            "status": status,
            **fields,
            "ms": rounded,
        }
        return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE).decode()
    shown = {**fields, **{f"{name}_ms": value for name, value in rounded.items()}}
    if record.client:  # a name in the keys file may have spaces, as may a forwarded address
        shown["client"] = _UNPRINTED.sub("?", record.client)
    pairs = " ".join(f"{name}={value}" for name, value in shown.items())
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time))  # as logging
    milliseconds = int(record.time * 1000) % 1000
    return f"{at},{milliseconds:03d} {level} {record.method} {record.route} {status} {pairs}\n"
