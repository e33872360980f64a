"""The log lines of a server, as text or as JSON, on standard error.

The access log has one line per answered request, never its content. The event loop only appends a
request; a thread formats the lines and writes them in batches.
"""

import logging
import os
import random
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Hashable
from contextlib import suppress
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Any

import orjson

from cloze.service.core import LogFormat, ServedRequest
from cloze.service.errors import StartupError
from cloze.service.machine import write_gate

_STDERR = 2
_CHUNK_BYTES = 4096
"""Bytes that a pipe which is ready for writing takes at once (`PIPE_BUF` of Linux)."""
_MOST_WAITING = 20_000
"""Most lines that wait for a reader; the oldest of more lines are counted and dropped."""
_LAST_WAIT_S = 1.0
"""Longest wait for a reader at the end of the process, per chunk of lines."""

_WRITE_EVERY_S = 0.1
"""Longest time until a line of a request is written."""

_REFUSALS = frozenset({401, 403, 429})
"""Statuses that cost the server nothing, so that a client may cause thousands per second."""

_MOST_REFUSALS = 10
"""Most lines per second for refusals of one kind."""

_UNPRINTED = re.compile(r"[^!-~]")

_TEXT = "%(asctime)s %(levelname)s %(message)s"


class LineWriter(logging.Handler):
    """Writes lines to standard error on a thread; a slow or stuck reader blocks no caller.

    A pipe that is ready for writing takes at least `_CHUNK_BYTES` at once, so a write of so many
    bytes after a poll does not wait, and lines of several processes do not mix.

    Attributes:
        waiting: lines with their line ends, and the arguments of `_line` for a line of a request.
    """

    def __init__(self, most_waiting: int = _MOST_WAITING) -> None:
        super().__init__()
        # Its bound is for a write that waits, although the poll said that it would not: another
        # process took the room. What the bound drops is not counted.
        self.waiting: deque[str | tuple[LogFormat, ServedRequest, int]] = deque(
            maxlen=2 * most_waiting
        )
        self._most = most_waiting
        self._chunk = b""  # what is written next
        self._hurry: SimpleQueue[None] = SimpleQueue()  # an Event would block a signal handler
        self._written = threading.Condition()

    def begin(self) -> None:
        """Begin to write what waits, until the process ends. logging calls `flush` at the end."""
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, and let the thread write it at once."""
        self.waiting.append(f"{self.format(record)}\n")
        self._wake()

    def flush(self) -> None:
        """Wait until all lines are written, or until nothing is read for `_LAST_WAIT_S`."""
        self._wake()
        with self._written:
            while (self.waiting or self._chunk) and self._written.wait(_LAST_WAIT_S):
                pass

    def _wake(self) -> None:
        if self._hurry.empty():
            self._hurry.put(None)

    def _write(self) -> None:
        waiting, is_writable = self.waiting, write_gate(_STDERR)
        missing = 0
        while True:
            if not waiting and not self._chunk:
                with suppress(Empty):
                    self._hurry.get(timeout=_WRITE_EVERY_S)
                continue
            for _ in range(len(waiting) - self._most):
                waiting.popleft()
                missing += 1
            if not is_writable(_WRITE_EVERY_S):
                continue
            if missing:
                text = f"{missing} lines are missing: the log was read too slowly\n"
                self._chunk, missing = self._chunk + text.encode(), 0
            while waiting and len(self._chunk) < _CHUNK_BYTES:
                line = waiting[0] if isinstance(waiting[0], str) else _line(*waiting[0])
                self._chunk += line.encode(errors="backslashreplace")
                waiting.popleft()  # last, so that `flush` sees each line somewhere
            end = self._chunk.rfind(b"\n", 0, _CHUNK_BYTES) + 1 or _CHUNK_BYTES
            try:
                written = os.write(_STDERR, self._chunk[:end])
            except OSError:  # nobody can read the lines
                written = len(self._chunk)
            self._chunk = self._chunk[written:]
            with self._written:
                self._written.notify_all()


WRITER = LineWriter()
"""Writes all log lines of this process."""


def start_logging(level: str, form: LogFormat) -> None:
    """Log to standard error from now on, from a level upwards."""
    WRITER.setFormatter(_JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    WRITER.begin()
    logging.basicConfig(level=level.upper(), handlers=[WRITER], force=True)


def announce(text: str) -> None:
    """Log a line at level info.

    Raises:
        StartupError: standard error cannot be written; a logger would ignore the error.
    """
    log = logging.getLogger("cloze")
    if not log.isEnabledFor(logging.INFO):
        return
    WRITER.flush()
    record = log.makeRecord("cloze", logging.INFO, __file__, 0, text, (), None)
    try:
        sys.stderr.write(f"{WRITER.format(record)}\n")
        sys.stderr.flush()
    except OSError as error:
        raise StartupError(
            f"the log (standard error) cannot be written: {error.strerror}"
        ) from error


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


class LineLimit:
    """Lets `_MOST_REFUSALS` lines per second and kind through, and counts the others."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, tuple[int, int, int]] = {}  # second, lines in it, left out

    def left_out(self, kind: Hashable, now: float) -> int | None:
        """Return how many lines of the kind were left out before this one; None: leave it out."""
        second, lines, left_out = self._kinds.get(kind, (0, 0, 0))
        if second != int(now):
            lines = 0
        if lines >= _MOST_REFUSALS:
            self._kinds[kind] = second, lines, left_out + 1
            return None
        self._kinds[kind] = int(now), lines + 1, 0
        return left_out


class AccessLog:
    """Chooses the requests of one process that get a line.

    Args:
        share: the share of the results to log, in [0, 1]; all errors are logged, except many
            refusals per second.
        quiet_routes: routes of probes and scrapes, whose results are logged only at debug.
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
        self._refusals = LineLimit()

    def add(self, request: ServedRequest) -> None:
        """Log a request. Call this method on the event loop."""
        if request.status < self._lowest_status:
            return
        if request.status < 400 and (
            request.route in self._quiet or (self._share < 1 and random.random() >= self._share)
        ):
            return
        left_out: int | None = 0
        if request.status in _REFUSALS:
            left_out = self._refusals.left_out(request.rejection or request.status, request.ended)
        if left_out is not None:
            self._writer.waiting.append((self._form, request, left_out))


def _line(form: LogFormat, request: ServedRequest, left_out: int = 0) -> str:
    """Return the line of a request, with its line end.

    `left_out` counts the refusals of its kind since the last one with a line.
    """
    status = request.status
    level = "INFO" if status < 400 else "WARNING" if status < 500 else "ERROR"
    ms = {"total": request.seconds}
    if request.texts:
        parts = (request.tokenize_s, request.queue_s, request.inference_s)
        ms |= zip(("tokenize", "queue", "inference"), parts, strict=True)
    rounded = {name: round(seconds * 1000, 2) for name, seconds in ms.items()}
    fields: dict[str, Any] = {
        "id": request.identity.decode(),
        "client": request.client,
        "model": request.model,
        "texts": request.texts,
        "tokens": request.texts and request.tokens,
        "error": request.error,
        "left_out": left_out,
    }
    fields = {name: value for name, value in fields.items() if value}
    if form == "json":
        values = {
            "time": _iso_time(request.ended),
            "level": level.lower(),
            "message": "request",
            "method": request.method,
            "route": request.route,
            "status": status,
            **fields,
            "ms": rounded,
        }
        return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE).decode()
    shown = {**fields, **{f"{name}_ms": value for name, value in rounded.items()}}
    if request.client:  # a name in the keys file may have spaces, as may a forwarded address
        shown["client"] = _UNPRINTED.sub("?", request.client)
    pairs = " ".join(f"{name}={value}" for name, value in shown.items())
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(request.ended))  # as logging
    milliseconds = int(request.ended * 1000) % 1000
    return f"{at},{milliseconds:03d} {level} {request.method} {request.route} {status} {pairs}\n"
